"""The measured rounds as rows, as text, and as settings to paste."""

from typing import Any

import numpy as np

from sam.bench.loads import batch_count
from sam.bench.settings import Settings, is_stock, speculation_of
from sam.bench.verdict import GO, NO_GO, NOISY, Verdict, decide, in_requests, median_interval

STAGES = ("forward_ms", "verify_ms", "draft_ms")
SAME_WORK = 0.05  # share by which the tokens of two variants may differ before a reader is warned


def rows_of(lines: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """One row for each load and variant that were measured.

    Args:
        lines: of sam.bench.rounds.RoundsFile.

    Returns:
        Medians over the rounds of `seconds`, `tokens_per_s`, `step_ms` (milliseconds of a step) and `steps`;
        `acceptance_length` over all rounds, `drafted` and `accepted` tokens of all rounds; `ratio`, `low`, `high`:
        seconds of the reference in the same round over the variant's, as sam.bench.verdict.median_interval;
        `all_rounds`: the same of all rounds' seconds;
        `as_recorded`: responses equal to the recording's, None where no text is forced;
        `identical` of `responses` that equal those of `off`, None without it or without seeds; `tokens_ratio`: its
        tokens over the reference's; `memory_mib` at most; `start_s`, median; `draft_errors`; `asynchronous`: whether
        the engine schedules asynchronously; `replays`: of all rounds, by phase, steps that replayed a graph and all
        steps, None without graphs and for stock.
    """
    rows = []
    for load, requests in enumerate(settings.requests):
        rounds = [line["runs"] for line in lines if line["load"] == load]
        rows += [_row(requests, variant, rounds, settings) for variant in settings.variants if rounds]
    return rows


def _row(requests: int, variant: str, rounds: list[dict], settings: Settings) -> dict[str, Any]:
    runs, base = [one[variant] for one in rounds], [one[settings.reference] for one in rounds]
    tokens = sum(run["tokens"] for run in runs)
    ratio, low, high = median_interval(ratios_of(rounds, settings.reference, variant))

    def middle(values, digits: int) -> float:
        return round(float(np.median(list(values))), digits)

    return {
        "requests": requests,
        "variant": variant,
        "rounds": len(rounds),
        "seconds": middle((run["seconds"] for run in runs), 3),
        "tokens_per_s": middle((run["tokens"] / run["seconds"] for run in runs), 1),
        "step_ms": middle((1e3 * run["seconds"] / run["steps"] for run in runs), 3),
        "steps": middle((run["steps"] for run in runs), 1),
        "acceptance_length": _acceptance_length(runs),
        "drafted": _sum_if_counted(runs, "drafted"),
        "accepted": _sum_if_counted(runs, "accepted"),
        "draft_errors": _sum_if_counted(runs, "draft_errors"),
        **{name: _of_a_step(runs, name) for name in STAGES},
        "ratio": ratio, "low": low, "high": high,
        "all_rounds": round(sum(run["seconds"] for run in base) / sum(run["seconds"] for run in runs), 3),
        "identical": _identical(rounds, variant, settings),
        "as_recorded": sum(run["as_recorded"] for run in runs) if settings.text else None,
        "responses": sum(len(run["responses"]) for run in runs),
        "tokens_ratio": round(tokens / max(1, sum(run["tokens"] for run in base)), 3),
        "memory_mib": max(run["memory_mib"] for run in runs),
        "start_s": middle((run["start_s"] for run in runs), 1),
        "asynchronous": runs[-1]["asynchronous"],
        "replays": sum_of_replays(runs),
    }  # fmt: skip


def ratios_of(rounds: list[dict[str, dict]], reference: str, variant: str) -> list[float]:
    """Seconds of the reference over the variant's, round by round."""
    return [one[reference]["seconds"] / one[variant]["seconds"] for one in rounds]


def _sum_if_counted(runs: list[dict], name: str) -> int | None:
    return sum(run[name] for run in runs) if all(run[name] is not None for run in runs) else None


def sum_of_replays(runs: list[dict[str, Any]]) -> dict[str, tuple[int, int]] | None:
    """`replays` of all runs together, as EngineSteps has it; None where one does not tell."""
    parts = [run.get("replays") for run in runs]  # stock does not tell, nor do rounds of an earlier version
    if None in parts:
        return None
    return {phase: tuple(np.sum([part[phase] for part in parts], axis=0).tolist()) for phase in parts[0]}


def _of_a_step(runs: list[dict], name: str) -> float | None:
    if (total := _sum_if_counted(runs, name)) is None:
        return None
    return round(total / sum(run["steps"] for run in runs), 3)


def split_of_step(row: dict[str, Any]) -> list[str] | None:
    """Milliseconds of a step: forward pass, sampling with verification, drafting, all else, whole; None for stock."""
    stages = [row[name] for name in STAGES]
    if None in stages:
        return None
    return [f"{ms:.2f}" for ms in (*stages, max(0.0, row["step_ms"] - sum(stages)), row["step_ms"])]


def _acceptance_length(runs: list[dict]) -> float | None:
    """Mean tokens of a step in which a request verified drafts, its own token included; 1 without drafts."""
    if any(run["verify_steps"] is None for run in runs):
        return None
    steps = sum(run["verify_steps"] for run in runs)
    return round(sum(run["verified_tokens"] for run in runs) / steps, 3) if steps else 1.0


def _identical(rounds: list[dict], variant: str, settings: Settings) -> int | None:
    if "off" not in settings.variants or not (settings.seeds or settings.temperature == 0):
        return None
    pairs = [(one[variant]["responses"], one["off"]["responses"]) for one in rounds]
    return sum(a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def verdicts_of(lines: list[dict[str, Any]], settings: Settings) -> dict[int, Verdict]:
    """What the rounds say about sam, by the loads' requests; empty where sam takes no part."""
    found = {}
    for load, requests in enumerate(settings.requests):
        rounds = [line["runs"] for line in lines if line["load"] == load]
        if rounds and "sam" in settings.variants:
            found[requests] = decide(ratios_of(rounds, settings.reference, "sam"))
    return found


def recommendation(verdicts: dict[int, Verdict], settings: Settings) -> str:
    """Settings to paste behind a run script of the recipe, and why."""
    answers = {requests: verdict.answer for requests, verdict in verdicts.items()}
    if not answers:
        return ""
    if all(answer == NO_GO for answer in answers.values()):
        return "speculation=off   # no load gains"
    if GO not in answers.values():
        return "no recommendation yet: no load is sure to gain"
    keys = {key: value for key, value in speculation_of("sam", settings.draft_tokens).items() if key != "method"}
    but = []
    for answer, words in ((NO_GO, "loses"), (NOISY, "is not known")):
        if loads := [str(requests) for requests, its in answers.items() if its == answer]:
            but.append(f"{words} at {', '.join(loads)}")
    words = ["speculation=sam", *(f"speculation.{key}={value}" for key, value in keys.items())]
    return " ".join(words) + (f"   # {' and '.join(but)}" if but else "")


def warnings_of(rows: list[dict[str, Any]], settings: Settings) -> list[str]:
    """What a reader must know before believing the rows."""
    found = []
    for row in rows:
        place = f"{row['variant']} at {in_requests(row['requests'])}"
        if row["draft_errors"]:
            found.append(f"{place}: drafting failed {row['draft_errors']} times: see {row['variant']}.log")
        if not is_stock(row["variant"]) and row["identical"] is not None and row["identical"] < row["responses"]:
            found.append(f"{place}: {row['responses'] - row['identical']} responses differ from those of off")
        if abs(row["tokens_ratio"] - 1) > SAME_WORK:
            found.append(
                f"{place}: {row['tokens_ratio']:.2f} times the tokens of {settings.reference}, so that seconds are not "
                "of the same work: use --ignore-eos or more rounds"
            )
    asynchronous = {row["variant"]: row["asynchronous"] for row in rows}
    if asynchronous.get("stock"):
        found += [
            f"{variant} schedules step by step, stock asynchronously: vLLM does not combine that with its drafter"
            for variant, its in asynchronous.items()
            if not its and not is_stock(variant)
        ]
    return found


def as_text(rows: list[dict[str, Any]], settings: Settings) -> str:
    """Lay out the rows as text."""
    width = max(11, *(len(row["variant"]) for row in rows))
    lines = [
        f"{'requests':>8} {'variant':{width}} {'seconds':>8} {'tokens/s':>9} {'ms/step':>8} {'steps':>7} {'length':>7} "
        f"{'drafted':>8} {'accepted':>8}  {'over ' + settings.reference:19} {'all':>6}  "
        + ("as recorded" if settings.text else "identical to off")
    ]
    for row in rows:
        counts = [_shown(row[name]) for name in ("acceptance_length", "drafted", "accepted")]
        equal = row["as_recorded"] if settings.text else row["identical"]
        same = "-" if equal is None else f"{equal} of {row['responses']}"
        lines.append(
            f"{row['requests']:8} {row['variant']:{width}} {row['seconds']:8.2f} {row['tokens_per_s']:9.1f} "
            f"{row['step_ms']:8.2f} {row['steps']:7.0f} {counts[0]:>7} {counts[1]:>8} {counts[2]:>8}  "
            f"{row['ratio']:.2f}x ({row['low']:.2f}-{row['high']:.2f}) {row['all_rounds']:7.2f}x  {same}"
        )
    for row in rows:
        if (split := split_of_step(row)) is not None:
            parts = "forward {}, sampling {}, drafting {}, all else {} ms".format(*split[:-1])
            lines.append(f"{row['variant']} at {in_requests(row['requests'])}, a step: {parts}")
    for variant, start, memory, scheduling, graphs in engines_of(rows):
        lines.append(f"{variant}: started in {start} s, {memory} MiB, schedules {scheduling}; graphs: {graphs}")
    return "\n".join(lines)


def batches_in_words(settings: Settings) -> str:
    """The batches of a round, of each load."""
    counts = [(batch_count(load, settings.responses), in_requests(load)) for load in settings.requests]
    return ", ".join(f"{count} of {load}" for count, load in counts)


def engines_of(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """Each variant's seconds to start, most MiB, how it schedules, and its steps that replayed a graph, by phase."""
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        its = [row for row in rows if row["variant"] == variant]
        start, memory = f"{its[-1]['start_s']:.1f}", f"{max(row['memory_mib'] for row in its):.0f}"
        scheduling = "asynchronously" if its[-1]["asynchronous"] else "step by step"
        found.append((variant, start, memory, scheduling, _graphs(sum_of_replays(its), variant)))
    return found


def _graphs(replays: dict[str, tuple[int, int]] | None, variant: str) -> str:
    if replays is None:
        return "not told" if is_stock(variant) else "none"
    shares = {phase: f"{replayed} of {steps} steps" for phase, (replayed, steps) in replays.items() if steps}
    return ", ".join(f"{share} {phase.replace('_', ' ')}" for phase, share in shares.items())


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
