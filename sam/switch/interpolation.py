"""Linear interpolation in a table of step costs; apart from it, since numba takes a second to import."""

from typing import NamedTuple

import numpy as np

from sam.jit import compiled, kernel


class Grid(NamedTuple):
    """A table's axes and cells, as `sam.switch.step_cost.StepCost` documents them."""

    requests: np.ndarray
    tokens_per_request: np.ndarray
    context: np.ndarray
    milliseconds: np.ndarray


@kernel
def _locate(axis, value):
    """The last point at or below `value` and the share of the way to the next one; held at both ends."""
    last = axis.size - 1
    if value <= axis[0] or last == 0:
        return 0, 0.0
    if value >= axis[last]:
        return last, 0.0
    i = np.searchsorted(axis, value, side="right") - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@kernel
def _cell(grid, i, u, m, c, w):
    """Milliseconds at `m` tokens per request, between requests i and i + 1 and between contexts c and c + 1."""
    above, beyond = min(i + 1, grid.requests.size - 1), min(c + 1, grid.context.size - 1)
    cells = grid.milliseconds
    near = cells[i, m, c] + u * (cells[above, m, c] - cells[i, m, c])
    far = cells[i, m, beyond] + u * (cells[above, m, beyond] - cells[i, m, beyond])
    return near + w * (far - near)


@kernel
def interpolate(grid, requests, num_tokens, context):
    """Milliseconds of one step with `requests` requests and `num_tokens` tokens in all, drafts included."""
    requests = max(1.0, requests)
    i, u = _locate(grid.requests, requests)
    c, w = _locate(grid.context, context)
    per_request, last = num_tokens / requests, grid.tokens_per_request.size - 1
    j, _ = _locate(grid.tokens_per_request, per_request)
    j = min(j, max(0, last - 1))  # beyond the table the last slope goes on
    total = _cell(grid, i, u, j, c, w)
    if last > 0 and per_request > grid.tokens_per_request[0]:
        width = grid.tokens_per_request[j + 1] - grid.tokens_per_request[j]
        total += (_cell(grid, i, u, j + 1, c, w) - total) / width * (per_request - grid.tokens_per_request[j])
    if requests > grid.requests[-1]:  # each further request takes as long as the mean one of the largest batch
        total *= requests / grid.requests[-1]
    return total


@compiled
def interpolate_each(grid, requests, num_tokens, context):
    """float64 [n]: `interpolate` for each of `num_tokens`, float64 [n]."""
    costs = np.empty(num_tokens.size, np.float64)
    for n in range(num_tokens.size):
        costs[n] = interpolate(grid, requests, num_tokens[n], context)
    return costs
