"""The report's page: its ten lines, tables and pictures as Markdown and as HTML."""

import base64
import html
from pathlib import Path

from recipe.report import tables
from recipe.report.runs import Run, config_difference

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}figure{margin:1.5em 0}figcaption{color:#555;font-size:.9em}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}"""

NOT_RECORDED = "not recorded"
NAMED_VERSIONS = {"verl": "verl", "vllm": "vLLM", "torch": "torch", "commit": "commit", "date": "run of"}
CURVES_IN_TEN_LINES = ("reward", "response length")


def all_tables(runs: list[Run], summary: dict) -> dict[str, tuple[tuple, list[tuple]]]:
    """Title to header and rows, in reading order; without rows where the runs have not recorded what is in them."""
    both = runs[:2]
    differences = [(key, *values) for key, values in config_difference(runs[0].config, runs[1].config).items()]
    return {
        "What to know of these figures": (("note",), [(line,) for line in remarks(runs, summary)]),
        "Whether the curves agree": (tables.AGREEMENT_HEADER, tables.agreement(*both)),
        "In the form of the published tables": (tables.PUBLISHED_HEADER, tables.published(*both)),
        "The tail": (tables.TAIL_HEADER, tables.tails(runs)),
        "Where the time went": (tables.PHASE_HEADER, tables.phases(*both)),
        "Acceptance over training": (tables.ACCEPTANCE_HEADER, tables.acceptance_over_training(runs)),
        "What differs between the two configs": (("key", "first", "second"), differences),
        "Versions": (("package", "version"), list(summary["versions"].items())),
        "Step by step": (tables.STEP_HEADER, tables.step_by_step(*both)),
    }


def remarks(runs: list[Run], summary: dict) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    lines = [remark for run in runs for remark in run.remarks]

    def without(part: str, among: list[Run]) -> str:
        return ", ".join(run.source for run in among if not getattr(run, part))

    if sources := without("has_engine_steps", runs):
        lines.append(f"no engine steps in {sources}: running requests over time and acceptance by position left out")
    if sources := without("has_responses", runs[:2]):
        lines.append(f"no responses in {sources}: identical responses and the replay by scope left out")
    if summary["rollout_speedup_tail"] is None:
        lines.append("the tail is left out: neither rollout/tail_seconds nor engine steps in both runs, or no tail")
    if runs[0].rollout_key != "rollout/seconds":
        lines.append(f"rollout time is verl's {runs[0].rollout_key}: rollout/seconds is not in all runs")
    if runs[0].name == "off":
        lines.append("the first run has speculation off: name the run that speculates first, the baseline second")
    return lines


def ten_lines(summary: dict) -> list[str]:
    """The figures a reader looks for first."""
    versions = summary["versions"]
    first, same = next(iter(summary["identical_by_step"].items()), (None, [0, 0]))
    agreement = {name: row for name, row in summary["agreement"].items() if name in CURVES_IN_TEN_LINES}
    curves = [f"{name}: {row['verdict']}, p {row['p']}" for name, row in agreement.items()]

    def figure(form: str, *keys: str) -> str:
        values = [summary.get(key) for key in keys]
        return NOT_RECORDED if None in values else form.format(*values)

    replayed = figure("scope=group {:.2f}, request {:.2f}", "accept_length_scope_group", "accept_length_scope_request")
    return [
        f"rollout speed-up, total   {figure('{:.2f}x over {} steps', 'rollout_speedup_total', 'steps')}",
        "rollout speed-up, tail    " + figure("{:.2f}x (at most {} running)", "rollout_speedup_tail", "tail_threshold"),
        f"mean acceptance length    {figure('{:.2f}', 'accept_length')} (replayed at full draft length: {replayed})",
        f"acceptance rate           {figure('{:.2f}', 'accept_rate')}",
        f"reward gain               {figure('{:+.3f} against {:+.3f}', 'reward_gain_sam', 'reward_gain_off')}"
        " (last three steps over first three)",
        f"the curves (paired test)  {', '.join(curves) or NOT_RECORDED}",
        f"identical responses       {figure('{} of {}', 'identical_responses', 'total_responses')}"
        + (f" (step {first}: {same[0]} of {same[1]})" if first else ""),
        "rollout seconds           " + ", ".join(f"{n} {s['rollout']:.0f}" for n, s in summary["seconds"].items()),
        f"peak memory               {figure('{} GiB', 'peak_memory_gib')}",
        ", ".join(f"{name} {versions.get(key) or NOT_RECORDED}" for key, name in NAMED_VERSIONS.items()),
    ]


def as_markdown(summary: dict, captions: dict[str, str], contents: dict[str, tuple]) -> str:
    lines = ["# Speculation on and off", "", "```", *ten_lines(summary), "```", ""]
    for name, caption in captions.items():
        lines += [f"## {_title(name)}", "", f"![{_title(name)}]({name}.png)", "", caption, ""]
    for title, (header, rows) in contents.items():
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [*(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
    return "\n".join(lines)


def as_html(summary: dict, captions: dict[str, str], contents: dict[str, tuple], pictures: Path) -> str:
    parts = [f"<pre>{html.escape(chr(10).join(ten_lines(summary)))}</pre>"]
    for name, caption in captions.items():
        image = base64.b64encode((pictures / f"{name}.png").read_bytes()).decode()
        parts.append(
            f"<h2>{_title(name)}</h2><figure><img alt='{_title(name)}' src='data:image/png;base64,{image}'>"
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    parts += [f"<h2>{title}</h2>{_table(*table)}" for title, table in contents.items()]
    head = f"<meta charset='utf-8'><title>Speculation on and off</title><style>{STYLE}</style>"
    body = f"<h1>Speculation on and off</h1>{''.join(parts)}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _table(header: tuple, rows: list[tuple]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
