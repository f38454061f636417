"""The report's words: the answer in a few lines, the ten lines on the screen, and what to know of the figures."""

import numpy as np

from recipe.report.runs import Run
from recipe.report.stock import MEASURE, times
from sam.bench.verdict import GO

NOT_RECORDED = "not recorded"
NAMED_VERSIONS = {"verl": "verl", "vllm": "vLLM", "torch": "torch", "commit": "commit", "date": "run of"}
CURVES_IN_SHORT = ("reward", "response length")


def answer(summary: dict) -> list[str]:
    """What the report says, in five lines; the first is the headline."""
    stock, (first, second) = summary["stock"], list(summary["seconds"])[:2]
    seconds = [summary["seconds"][name]["rollout"] for name in (second, first)]
    in_verl = f"{_figure(summary, '{:.2f}x', 'rollout_speedup_total')} speculation={second}"
    of_steps = f"({seconds[0]:.1f} s to {seconds[1]:.1f} s in {summary['steps']} steps)"
    if stock:
        method = next(iter(set(stock["over_stock"]) - {"off"}))
        doubt = "" if stock["verdict"] == GO else f": {stock['verdict']}"
        lines = [
            f"Rollout {times(stock['over_stock'][method])} as fast as stock vLLM{doubt}",
            f"Engines alone, the same text: stock, off and {method} take turns at emitting this run's recorded "
            f"responses ({stock['rounds']} rounds of {stock['requests']} requests); without drafts (off) "
            f"{times(stock['over_stock']['off'])}.",
            f"In all of verl, where stock vLLM cannot train on a CPU: {in_verl} {of_steps}.",
        ]
    else:
        lines = [f"Rollout {in_verl} {of_steps}", f"{summary['stock_note']}."]
    return [*lines, _identical(summary), f"Curves (paired test): {_curves(summary)}."]


def _identical(summary: dict) -> str:
    if summary["identical_responses"] is None:
        return "Identical responses: not recorded."
    same, total = summary["identical_responses"], summary["total_responses"]
    first, second = list(summary["seconds"])[:2]
    return f"{same} of {total} responses identical, token for token, with speculation={first} and {second}."


def _curves(summary: dict) -> str:
    rows = {name: row for name, row in summary["agreement"].items() if name in CURVES_IN_SHORT}
    return ", ".join(f"{name}: {row['verdict']}, p {row['p']}" for name, row in rows.items()) or NOT_RECORDED


def _figure(summary: dict, form: str, *keys: str) -> str:
    values = [summary.get(key) for key in keys]
    return form.format(*values) if all(value is not None and np.isfinite(value) for value in values) else NOT_RECORDED


def _scheduling(summary: dict) -> str:
    """How each run's engines schedule, as a part of a line; nothing where it is not recorded."""
    said = [
        f"{name} {'asynchronously' if is_asynchronous else 'synchronously'}"
        for name, is_asynchronous in summary["asynchronous_scheduling"].items()
        if is_asynchronous is not None
    ]
    return f"; scheduled {', '.join(said)}" if said else ""


def ten_lines(summary: dict) -> list[str]:
    """The figures a reader looks for first."""

    def figure(form: str, *keys: str) -> str:
        return _figure(summary, form, *keys)

    versions, stock = summary["versions"], summary["stock"]
    first, same = next(iter(summary["identical_by_step"].items()), (None, [0, 0]))
    measured = f"not measured ({MEASURE})"
    if stock:
        ratios = ", ".join(f"{engine} {times(ratio)}" for engine, ratio in stock["over_stock"].items())
        measured = f"{ratios}, engine alone, same text, {stock['rounds']} rounds"
    replayed = figure("scope=group {:.2f}, request {:.2f}", "accept_length_scope_group", "accept_length_scope_request")
    return [
        f"rollout over stock vLLM   {measured}",
        f"rollout speed-up, total   {figure('{:.2f}x over {} steps', 'rollout_speedup_total', 'steps')}",
        "rollout speed-up, tail    " + figure("{:.2f}x (at most {} running)", "rollout_speedup_tail", "tail_threshold"),
        f"mean acceptance length    {figure('{:.2f}', 'accept_length')} (replayed at full draft length: {replayed})",
        f"acceptance rate           {figure('{:.2f}', 'accept_rate')}",
        f"reward gain               {figure('{:+.3f} against {:+.3f}', 'reward_gain_sam', 'reward_gain_off')}"
        " (last three steps over first three)",
        f"the curves (paired test)  {_curves(summary)}",
        f"identical responses       {figure('{} of {}', 'identical_responses', 'total_responses')}"
        + (f" (step {first}: {same[0]} of {same[1]})" if first else ""),
        "rollout seconds           "
        + ", ".join(f"{n} {s['rollout']:.0f}" for n, s in summary["seconds"].items())
        + _scheduling(summary)
        + f"; peak memory {figure('{} GiB', 'peak_memory_gib')}",
        ", ".join(f"{name} {versions.get(key) or NOT_RECORDED}" for key, name in NAMED_VERSIONS.items()),
    ]


def remarks(runs: list[Run], summary: dict) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    lines = [remark for run in runs for remark in run.remarks]

    def without(part: str, among: list[Run]) -> str:
        return ", ".join(run.source for run in among if not getattr(run, part))

    if summary["stock_note"]:
        lines.append(summary["stock_note"])
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
