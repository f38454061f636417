"""Step costs as the simulator looks them up: one step at a time, a hundred thousand times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sam.jit import compiled
from sam.switch.step_cost import StepCost

SHIPPED = Path(__file__).parent / "step_costs"


def load_step_cost(name: str) -> StepCost:
    """A table by its file, or by the name of one that this package ships.

    Raises:
        ValueError: neither, or not a table.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return StepCost.load(path)
    if (shipped := SHIPPED / f"{name}.json").is_file():
        return StepCost.load(shipped)
    raise ValueError(f"step cost {name!r}: neither a file nor one of {', '.join(shipped_step_costs())}")


def shipped_step_costs() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json") if not path.stem.startswith("acceptance"))


class StepClock:
    """StepCost.of for single steps, about thirty times as fast."""

    def __init__(self, cost: StepCost):
        self._table = (
            cost.requests.astype(np.float64),
            cost.tokens_per_request.astype(np.float64),
            cost.context.astype(np.float64),
            np.ascontiguousarray(cost.milliseconds),
        )

    def steps_to_knot(self, context: float) -> int:
        """Steps that can be taken from this context until costs are no longer linear in it."""
        knots = self._table[2]
        place = int(np.searchsorted(knots, context, side="right"))
        return max(1, int(knots[place] - context) + 1) if place < len(knots) else 1 << 60

    def milliseconds(self, requests: int, rows: int, context: float) -> float:
        """Of a step with `requests` requests that verifies `rows` tokens, of `context` tokens in the mean."""
        return look_up(*self._table, float(requests), float(rows), float(context))


@compiled
def place(axis, value):
    """Index of the last point at or below `value`, and how far on to the next one it is; held at both ends."""
    if value <= axis[0]:
        return 0, 0.0
    last = axis.size - 1
    if value >= axis[last]:
        return last, 0.0
    i = np.searchsorted(axis, value, side="right") - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@compiled
def look_up(requests_axis, tokens_axis, context_axis, cells, requests, rows, context):
    requests = max(1.0, requests)
    i, u = place(requests_axis, requests)
    c, w = place(context_axis, context)
    above, beyond = min(i + 1, requests_axis.size - 1), min(c + 1, context_axis.size - 1)
    tokens = rows / requests
    j, v = place(tokens_axis, tokens)
    last = tokens_axis.size - 1
    if j == last and last > 0:  # the last slope goes on
        j, v = last - 1, (tokens - tokens_axis[last - 1]) / (tokens_axis[last] - tokens_axis[last - 1])
    total = 0.0
    for step in range(2):
        weight = v if step else 1.0 - v
        if weight != 0.0:
            m = j + step
            near = (1.0 - u) * cells[i, m, c] + u * cells[above, m, c]
            far = (1.0 - u) * cells[i, m, beyond] + u * cells[above, m, beyond]
            total += weight * ((1.0 - w) * near + w * far)
    if requests > requests_axis[-1]:
        total *= requests / requests_axis[-1]
    return total
