"""`python -m recipe.report RUN_SAM RUN_OFF [RUN ...]`: two runs compared, as HTML, Markdown, PNG and JSON.

The first run speculates, the second is the baseline; more runs are peers shown beside them. A run is a run directory,
or entity/project/run_id of a wandb server.
"""

import argparse
import json
import sys
from pathlib import Path

from recipe.report.answer import remarks, ten_lines
from recipe.report.page import all_tables, as_html, as_markdown
from recipe.report.runs import make_comparable, summarize
from recipe.report.scopes import replay_scopes
from recipe.report.stock import AgainstStock
from recipe.report.tables import AGREEMENT_HEADER, agreement
from recipe.report.wandb_reader import load_run
from sam.command import run_command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs",
        nargs="+",
        help="speculating, baseline, peers; each a run directory, or entity/project/run_id "
        " or the address of a run on a wandb server",
    )
    parser.add_argument(
        "--output", type=Path, help="where to write; by default the first run directory's parent, or outputs/report"
    )
    options = parser.parse_args(arguments)
    if len(options.runs) < 2:
        parser.error("two runs are compared: give a speculating run and a baseline")
    return run_command(lambda: report(options.runs, options.output))


def report(sources: list[str], output: Path | None) -> str:
    """Write report.html, report.md, the pictures and summary.json into `output`; returns what is printed."""
    runs = [load_run(source) for source in sources]
    make_comparable(runs)
    summary = summarize(runs)
    header, rows = AGREEMENT_HEADER, agreement(*runs[:2])
    summary["agreement"] = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    scopes = replay_scopes(runs[0])
    for scope, result in scopes.items():
        summary[f"accept_length_scope_{scope}"] = result.summary()["mean_acceptance_length"]
    from recipe.report.plots import draw_all

    output = output or (runs[0].directory.parent if runs[0].directory else Path("outputs/report"))
    output.mkdir(parents=True, exist_ok=True)
    stock, summary["stock_note"] = AgainstStock.load(output, runs[0])
    summary["stock"] = stock and stock.summary()
    pictures = draw_all(runs, summary["tail_threshold"], scopes, stock)
    for picture in pictures:
        picture.figure.savefig(output / f"{picture.name}.png", dpi=120)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    tables = all_tables(runs, summary, stock)
    (output / "report.md").write_text(as_markdown(summary, pictures, tables))
    (output / "report.html").write_text(as_html(summary, pictures, tables))
    notes = (f"note: {line}" for line in remarks(runs, summary))
    return "\n".join([*ten_lines(summary), *notes, f"report: {output / 'report.html'}"])


if __name__ == "__main__":
    sys.exit(main())
