"""`python -m recipe.report RUN_SAM RUN_OFF [RUN ...]`: two runs compared, as HTML, Markdown, PNG and JSON.

The first run speculates, the second is the baseline; more runs are peers shown beside them.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from pathlib import Path

from recipe.report_agreement import AGREEMENT_HEADER, PHASE_HEADER, agreement, phases
from recipe.report_data import ReportError, Run, config_difference, summarize
from recipe.report_scopes import replay_scopes
from sam.lockstep import Replay
from sam.traces import TraceError

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}figure{margin:1.5em 0}figcaption{color:#555;font-size:.9em}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories: speculating, baseline, peers")
    parser.add_argument("--output", type=Path, help="where to write; the first run's parent by default")
    options = parser.parse_args(arguments)
    if len(options.runs) < 2:
        parser.error("two runs are compared: give a speculating run and a baseline")
    try:
        runs = [Run.load(directory) for directory in options.runs]
        summary = summarize(runs)
        scopes = replay_scopes(runs[0])
    except (ReportError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.output or options.runs[0].parent
    for scope, result in scopes.items():
        summary[f"accept_length_scope_{scope}"] = result.summary()["mean_acceptance_length"]
    write(runs, summary, scopes, output)
    print("\n".join(ten_lines(summary)))
    print(f"report: {output / 'report.html'}")
    return 0


def write(runs: list[Run], summary: dict, scopes: dict[str, Replay], output: Path) -> None:
    """Write report.html, report.md, the pictures and summary.json into `output`."""
    from recipe.report_plots import draw_all

    output.mkdir(parents=True, exist_ok=True)
    captions = draw_all(runs, summary["tail_threshold"], scopes, output)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    tables = {
        "Whether the curves agree": (AGREEMENT_HEADER, agreement(*runs[:2])),
        "Where the time went": (PHASE_HEADER, phases(*runs[:2])),
        "What differs between the two configs": (
            ("key", "first", "second"),
            [(key, *values) for key, values in config_difference(runs[0].config, runs[1].config).items()],
        ),
        "Versions": (("what", "version"), list(summary["versions"].items())),
    }
    (output / "report.md").write_text(as_markdown(summary, captions, tables))
    (output / "report.html").write_text(as_html(summary, captions, tables, output))


def ten_lines(summary: dict) -> list[str]:
    """The figures a reader looks for first."""
    versions = summary["versions"]
    first_step = next(iter(summary["identical_by_step"].values()), [0, 0])
    return [
        f"rollout speed-up, total   {summary['rollout_speedup_total']:.2f}x over {summary['steps']} steps",
        f"rollout speed-up, tail    {summary['rollout_speedup_tail']:.2f}x"
        f" (at most {summary['tail_threshold']} running)",
        f"mean acceptance length    {summary['accept_length']:.2f} (replayed at full draft length: scope=group"
        f" {summary['accept_length_scope_group']:.2f}, request {summary['accept_length_scope_request']:.2f})",
        f"acceptance rate           {summary['accept_rate']:.2f}",
        f"reward gain, speculating  {summary['reward_gain_sam']:+.3f} (last three steps over first three)",
        f"reward gain, baseline     {summary['reward_gain_off']:+.3f}",
        f"identical responses       {summary['identical_responses']} of {summary['total_responses']}"
        f" (step 1: {first_step[0]} of {first_step[1]})",
        "rollout seconds           " + ", ".join(f"{n} {s['rollout']:.0f}" for n, s in summary["seconds"].items()),
        f"peak memory               {summary['peak_memory_gib']} GiB",
        f"verl {versions.get('verl')}, vLLM {versions.get('vllm')}, torch {versions.get('torch')},"
        f" commit {versions.get('commit')}, {versions.get('date')}",
    ]


def as_markdown(summary: dict, captions: dict[str, str], tables: dict[str, tuple]) -> str:
    lines = ["# Speculation on and off", "", "```", *ten_lines(summary), "```", ""]
    for name, caption in captions.items():
        lines += [f"## {_title(name)}", "", f"![{_title(name)}]({name}.png)", "", caption, ""]
    for title, (header, rows) in tables.items():
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [*(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
    return "\n".join(lines)


def as_html(summary: dict, captions: dict[str, str], tables: dict[str, tuple], pictures: Path) -> str:
    parts = [f"<pre>{html.escape(chr(10).join(ten_lines(summary)))}</pre>"]
    for name, caption in captions.items():
        image = base64.b64encode((pictures / f"{name}.png").read_bytes()).decode()
        parts.append(
            f"<h2>{_title(name)}</h2><figure><img alt='{_title(name)}' src='data:image/png;base64,{image}'>"
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    parts += [f"<h2>{title}</h2>{_table(*table)}" for title, table in tables.items()]
    head = f"<meta charset='utf-8'><title>Speculation on and off</title><style>{STYLE}</style>"
    body = f"<h1>Speculation on and off</h1>{''.join(parts)}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _table(header: tuple, rows: list[tuple]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


if __name__ == "__main__":
    sys.exit(main())
