"""`sam report RUN [BASELINE [PEER ...]]`: a run beside its baseline, on one HTML page and as JSON.

The first run speculates; without a second one nothing is compared. Behind them, such pairs of other seeds give a band
to what differs, and any other run its curves. A run is a run directory.
"""

import json
from pathlib import Path

from recipe.sam_dapo.record.settings import differences
from recipe.sam_dapo.report import accuracy
from recipe.sam_dapo.report.answer import answer, facts, remarks, summarize
from recipe.sam_dapo.report.phases import ERRORS, LEAST_SHARE, table_of_phases
from recipe.sam_dapo.report.pictures import draw_phases, draw_rollout
from recipe.sam_dapo.report.runs import Run, drafted_texts, load_runs, load_stock, rows_of
from sam.command import Parser, run_command
from sam.tools.bench.result import table_of
from sam.tools.page import Section, page

TITLE = "Does speculation pay?"
PHASES = (
    "Means of a training step. Noise: a difference of at most "
    f"{ERRORS:g} standard errors over the steps, or of less than {100 * LEAST_SHARE:g} % of a step."
)
DRAFTED = (
    "Samples of one prompt, which comes first. Green: accepted drafts. Black: the model's own tokens. Grey: what was "
    "given to it. A run counts accepted drafts, not which they were: here sam drafts the recorded text again, in every "
    "step, from the prompt's samples alone."
)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories: speculating, baseline, peers")
    parser.add_argument("--output", type=Path, help="where to write; by default the first run directory's parent")
    options = parser.parse_args(arguments)
    return run_command(lambda: report(options.runs, options.output))


def report(directories: list[Path], output: Path | None) -> str:
    """Write report.html and summary.json into `output`; returns what is printed."""
    if accuracy.only_validated(directories):
        return accuracy.report(directories, output)
    runs = load_runs(directories)
    output = output or runs[0].directory.parent
    against, note = load_stock(output, runs[0])
    summary = summarize(runs) | {"stock": against and rows_of(against), "stock_note": note}
    texts = drafted_texts(runs[0])
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(as_html(runs, summary, against, texts))
    values = [f"{name:<28}{value}" for name, value in facts(summary)]
    notes = [f"note: {line}" for line in remarks(runs, summary)]
    lines = [line for line in answer(runs, summary, against) if line]
    return "\n".join([*lines, *values, *notes, f"report: {output / 'report.html'}"])


def as_html(runs: list[Run], summary: dict, against: dict | None, texts: list) -> str:
    """The page: the answer, where the time went, the other pictures, responses, then the tables that have rows."""
    differing = differences(runs[0].config, runs[1].config).items() if runs[1:] else ()
    changed = [(key, *values) for key, values in differing]
    names = [run.name for run in runs[:2]]
    tables = {
        "Figures": (("figure", "value"), facts(summary)),
        "What to know of these figures": (("note",), [(line,) for line in remarks(runs, summary)]),
        "Engines alone, on the recorded text": table_of(against) if against else ((), ()),
        "What differs between the two configs": (("key", *names), changed),
        "To repeat the first run": (("what", "value"), list(runs[0].versions.items())),
    }
    sections = [
        Section("", draw_phases(runs)),
        Section("Seconds of each phase", caption=PHASES if runs[1:] else "", table=table_of_phases(runs)),
        Section("The rollout and the training", draw_rollout(runs, against)),
    ]
    if texts:
        sections.append(Section("Drafts in a few responses", caption=DRAFTED, texts=texts))
    sections += [Section(title, table=table) for title, table in tables.items() if table[1]]
    return page(TITLE, answer(runs, summary, against), sections)
