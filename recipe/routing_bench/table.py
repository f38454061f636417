"""The results of recipe.routing_bench: medians and ranges over the rounds, each beside verl's in the same round, and
all rounds together, as a training run has them one after the other."""

from collections.abc import Collection

import numpy as np

from recipe.routing_bench.results import Rollout

IDENTICAL = {True: "yes", False: "NO", None: "own prompts"}


def rows(rounds: list[dict[str, Rollout]], reference: str, own_prompts: Collection[str] = ()) -> list[dict]:
    """One row for each variant.

    `speedup`: the reference's seconds over its own; `tail`: its tail seconds over the reference's; medians of the
    rounds, with the range. `all_rounds` and `all_tails`: the same of the rounds' sums. `identical`: whether
    all its responses are the reference's, token for token; None for those in `own_prompts`, whose prompts the reference
    did not have.
    """
    found = []
    for name in rounds[0]:
        pairs = [(one[name], one[reference]) for one in rounds]
        ratios = [base.seconds / own.seconds for own, base in pairs]
        tails = [own.tail_seconds / max(1e-9, base.tail_seconds) for own, base in pairs]
        row = {
            "variant": name,
            "speedup": _middle(ratios),
            "speedup_range": _range(ratios),
            "all_rounds": _ratio([base.seconds for _, base in pairs], [own.seconds for own, _ in pairs]),
            "tail": _middle(tails),
            "tail_range": _range(tails),
            "all_tails": _ratio([own.tail_seconds for own, _ in pairs], [base.tail_seconds for _, base in pairs]),
            "identical": None if name in own_prompts else all(own.responses == base.responses for own, base in pairs),
        }
        for number in ("seconds", "tail_seconds", "start_to_end_seconds", "idle_share"):
            row[number] = _middle([getattr(own, number) for own, _ in pairs])
        row["as_drawn"] = round(sum(own.as_drawn for own, _ in pairs) / sum(len(own.responses) for own, _ in pairs), 4)
        row["moves"] = sum(own.status.get("moves", 0) for own, _ in pairs)
        found.append(row)
    return found


def as_text(table: list[dict], reference: str) -> str:
    """Lay out the rows."""
    lines = [
        f"{'variant':40} {'seconds':>8} {'over ' + reference:>10} {'(range)':>14} {'all':>6} {'tail s':>7} "
        f"{'of its tail':>11} {'(range)':>12} {'all':>6} {'idle slots':>10} {'moves':>6} identical tokens"
    ]
    for row in table:
        low, high = row["speedup_range"]
        tail_low, tail_high = row["tail_range"]
        lines.append(
            f"{row['variant']:40} {row['seconds']:8.2f} {row['speedup']:9.2f}x ({low:.2f}-{high:.2f}) "
            f"{row['all_rounds']:8.2f}x {row['tail_seconds']:7.2f} {row['tail']:10.2f}x "
            f"({tail_low:.2f}-{tail_high:.2f}) {row['all_tails']:6.2f}x {row['idle_share']:9.0%} {row['moves']:6} "
            f"{IDENTICAL[row['identical']]}"
        )
    return "\n".join(lines)


def _middle(values: list[float]) -> float:
    return round(float(np.median(values)), 4)


def _ratio(above: list[float], below: list[float]) -> float:
    return round(sum(above) / max(1e-9, sum(below)), 4)


def _range(values: list[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]
