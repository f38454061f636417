"""`sam report RUN_SAM RUN_OFF [RUN ...]`: two runs compared, on one HTML page and as JSON.

The first run speculates, the second is the baseline; more runs are peers shown beside them. A run is a run directory,
or entity/project/run_id of a wandb server.
"""

import json
from pathlib import Path

from recipe.record import differences
from recipe.report import figures
from recipe.report.runs import Run, load_run, load_stock, make_comparable, stock_summary
from sam.bench.result import table_of
from sam.command import Parser, run_command
from sam.page import Section, page

TITLE = "Does speculation pay?"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs",
        nargs="+",
        help="speculating, baseline, peers; each a run directory, or entity/project/run_id or the address of a run on "
        "a wandb server",
    )
    parser.add_argument(
        "--output", type=Path, help="where to write; by default the first run directory's parent, or outputs/report"
    )
    options = parser.parse_args(arguments)
    if len(options.runs) < 2:
        parser.error("two runs are compared: give a speculating run and a baseline")
    return run_command(lambda: report(options.runs, options.output))


def report(sources: list[str], output: Path | None) -> str:
    """Write report.html and summary.json into `output`; returns what is printed."""
    runs = [load_run(source) for source in sources]
    make_comparable(runs)
    output = output or (runs[0].directory.parent if runs[0].directory else Path("outputs/report"))
    against, note = load_stock(output, runs[0])
    summary = figures.summarize(runs) | {"stock": against and stock_summary(against), "stock_note": note}
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(as_html(runs, summary, against))
    values = [f"{name:<24}{value}" for name, value in figures.facts(summary)]
    notes = (f"note: {line}" for line in figures.remarks(runs, summary))
    return "\n".join([*figures.answer(summary, against), *values, *notes, f"report: {output / 'report.html'}"])


def as_html(runs: list[Run], summary: dict, against: dict | None) -> str:
    """The page: the answer, the pictures, then the tables that have rows."""
    first, second = runs[:2]
    differing = differences(first.config, second.config).items()
    tables = {
        "Figures": (("figure", "value"), figures.facts(summary)),
        "What to know of these figures": (("note",), [(line,) for line in figures.remarks(runs, summary)]),
        "Engines alone, on the recorded text": table_of(against) if against else ((), ()),
        "Whether the curves agree": (figures.AGREEMENT_HEADER, figures.agreement(first, second)),
        "Seconds of each phase": (figures.PHASE_HEADER, figures.phases(first, second)),
        "What differs between the two configs": (("key", "first", "second"), [(k, *v) for k, v in differing]),
        "Versions": (("package", "version"), list(first.versions.items())),
    }
    sections = [Section(part, pictures) for part, pictures in figures.draw_all(runs).items()]
    sections += [Section(title, table=table) for title, table in tables.items() if table[1]]
    return page(TITLE, figures.answer(summary, against), sections)
