"""Grids of step costs, measured on an engine of known cost that something else disturbs."""

import logging

import numpy as np
import pytest

from sam.profile import grid
from sam.profile.grid import PAUSES_S, ROUNDS, Grid, measure_cells

GRID = Grid(requests=[1, 4, 6], drafts=[0, 2, 5], context=[64, 512])
STEPS = 4


def cost(requests, drafts, context):
    return 5.0 + 0.2 * requests + 0.1 * requests * (1 + drafts) + 0.001 * context


TRUE = np.array([[[cost(n, k, c) for c in GRID.context] for k in GRID.drafts] for n in GRID.requests])


class FakeEngine:
    """Steps of known cost.

    Args:
        disturbance: of a place (requests, drafts, context) and how often it has been visited: float or float [STEPS],
            times as long as its steps are.
    """

    def __init__(self, disturbance=lambda place, visit: 1.0):
        self.visits = []
        self._disturbance = disturbance
        self._running = None

    def start(self, requests, context):
        assert self._running is None, "the requests before are still running"
        self._running = requests, context

    def steps(self, drafts):
        requests, context = self._running
        place = requests, drafts, context
        self.visits.append(place)
        return list(cost(*place) * np.broadcast_to(self._disturbance(place, self.visits.count(place)), STEPS))

    def stop(self):
        self._running = None


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Waited seconds, without the wait."""
    waited = []
    monkeypatch.setattr(grid.time, "sleep", waited.append)
    return waited


def test_every_round_visits_every_cell_once(pauses):
    engine = FakeEngine()
    assert measure_cells(engine, GRID) == pytest.approx(TRUE)
    rounds = np.array(engine.visits).reshape(ROUNDS, TRUE.size, 3)
    assert all(len(np.unique(visits, axis=0)) == TRUE.size for visits in rounds)
    assert pauses == []


@pytest.mark.parametrize(
    "disturbance",
    [
        lambda place, visit: np.array([1.0, 3.0, 40.0, 1.0]),
        lambda place, visit: 1.0 if visit == 2 else 40.0,
    ],
)
def test_a_disturbance_of_half_the_steps_or_two_of_three_rounds_is_not_seen(disturbance, pauses):
    assert measure_cells(FakeEngine(disturbance), GRID) == pytest.approx(TRUE)
    assert pauses == []


@pytest.mark.parametrize("times", [1.6, 30.0])
@pytest.mark.parametrize("bad", [(1, 0, 64), (4, 2, 512), (4, 5, 64)])
def test_a_cell_disturbed_in_every_round_is_measured_again_alone(bad, times, caplog, pauses):
    engine = FakeEngine(lambda place, visit: times if place == bad and visit <= ROUNDS else 1.0)
    with caplog.at_level(logging.WARNING, "sam.profile.grid"):
        cells = measure_cells(engine, GRID)
    assert cells == pytest.approx(TRUE)
    assert np.array_equal(GRID.table(cells).milliseconds, cells)
    assert engine.visits[ROUNDS * TRUE.size :] == [bad] * ROUNDS and pauses == [PAUSES_S[0]]
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"1 of {TRUE.size} step costs" in line and f"1 of at most {len(PAUSES_S)} times" in line
    assert f"{bad[0]} requests x {bad[1] + 1} tokens at context {bad[2]}" in line


def test_a_disturbance_that_goes_on_for_some_time_is_waited_for(pauses):
    until = ROUNDS * (TRUE.size + 2 * TRUE[0].size)
    engine = FakeEngine(lambda place, visit: 3.0 if place[0] == 1 and len(engine.visits) <= until else 1.0)
    assert measure_cells(engine, GRID) == pytest.approx(TRUE)
    assert pauses == list(PAUSES_S[:3])


def test_measuring_again_never_makes_it_worse():
    engine = FakeEngine(lambda place, visit: (1.5 if visit <= ROUNDS else 30.0) if place == (4, 2, 512) else 1.0)
    wrong = measure_cells(engine, GRID) / TRUE
    assert wrong[1, 1, 1] == pytest.approx(1.5) and wrong.sum() == pytest.approx(TRUE.size + 0.5)


def test_a_cell_that_stays_wrong_is_refused_after_so_many_times(pauses):
    engine = FakeEngine(lambda place, visit: 2.0 if place == (4, 2, 512) else 1.0)
    cells = measure_cells(engine, GRID)
    assert engine.visits.count((4, 2, 512)) == ROUNDS * (1 + len(PAUSES_S)) and pauses == list(PAUSES_S)
    with pytest.raises(ValueError, match=r"less work \(4 requests x 3 tokens: .*measure it again") as error:
        GRID.table(cells)
    assert "\n" not in str(error.value)
