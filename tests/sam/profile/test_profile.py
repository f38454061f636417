"""Step costs of recorded runs, and a grid of them, measured on an engine of known cost that something else disturbs."""

import logging
import re

import numpy as np
import pytest

from sam import profile
from sam.profile import PAUSES_S, ROUNDS, Grid, main, measure_cells
from sam.simulate.run import least_squares_without_negative_terms
from sam.switch.step_cost import StepCost
from tests.sam.simulate.test_recorded import COST, write_run

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
    monkeypatch.setattr(profile.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize(
    "disturbance",
    [
        lambda place, visit: 1.0,
        lambda place, visit: np.array([1.0, 3.0, 40.0, 1.0]),
        lambda place, visit: 1.0 if visit == 2 else 40.0,
    ],
)
def test_a_disturbance_of_half_the_steps_or_two_of_three_rounds_is_not_seen(disturbance, pauses):
    engine = FakeEngine(disturbance)
    assert measure_cells(engine, GRID) == pytest.approx(TRUE) and pauses == []
    rounds = np.array(engine.visits).reshape(ROUNDS, TRUE.size, 3)
    assert all(len(np.unique(visits, axis=0)) == TRUE.size for visits in rounds)


@pytest.mark.parametrize(("bad", "times"), [((1, 0, 64), 30.0), ((4, 2, 512), 1.6), ((4, 5, 64), 30.0)])
def test_a_cell_disturbed_in_every_round_is_measured_again_alone(bad, times, caplog, pauses):
    engine = FakeEngine(lambda place, visit: times if place == bad and visit <= ROUNDS else 1.0)
    with caplog.at_level(logging.WARNING, "sam.profile"):
        cells = measure_cells(engine, GRID)
    assert cells == pytest.approx(TRUE) and np.array_equal(GRID.table(cells).milliseconds, cells)
    assert engine.visits[ROUNDS * TRUE.size :] == [bad] * ROUNDS and pauses == [PAUSES_S[0]]
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"1 of {TRUE.size} step costs" in line and f"1 of at most {len(PAUSES_S)} times" in line
    assert f"{bad[0]} requests x {bad[1] + 1} tokens at context {bad[2]}" in line


def test_a_disturbance_that_goes_on_for_some_time_is_waited_for(pauses):
    until = ROUNDS * (TRUE.size + 2 * TRUE[0].size)
    engine = FakeEngine(lambda place, visit: 3.0 if place[0] == 1 and len(engine.visits) <= until else 1.0)
    assert measure_cells(engine, GRID) == pytest.approx(TRUE) and pauses == list(PAUSES_S[:3])


def test_a_cell_that_stays_wrong_is_refused_after_so_many_times(pauses):
    """Measured again it comes out worse, which does not count."""
    engine = FakeEngine(lambda place, visit: (2.0 if visit <= ROUNDS else 30.0) if place == (4, 2, 512) else 1.0)
    cells = measure_cells(engine, GRID)
    assert cells[1, 1, 1] == pytest.approx(2 * TRUE[1, 1, 1])
    assert engine.visits.count((4, 2, 512)) == ROUNDS * (1 + len(PAUSES_S)) and pauses == list(PAUSES_S)
    with pytest.raises(ValueError, match=r"less work \(4 requests x 3 tokens: .*measure it again"):
        GRID.table(cells)


def test_least_squares_leaves_negative_terms_out():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    assert least_squares_without_negative_terms(columns, np.array([4.0, 5.0, 7.0])) == pytest.approx([3.0, 1.0])
    assert least_squares_without_negative_terms(columns, np.array([5.0, 5.0, 2.0])) == pytest.approx([4.0, 0.0])


def test_recorded_runs_give_the_cost_of_their_steps(tmp_path, capsys):
    output = tmp_path / "cost.json"
    runs = [write_run(tmp_path / "on"), write_run(tmp_path / "off", method="off")]
    assert main(["--from-run", *map(str, runs), "--output", str(output)]) == 0
    table, shown = StepCost.load(output), capsys.readouterr().out
    for requests, rows in ((1, 1), (2, 8), (12, 12)):
        assert table.step_ms(requests, rows, 20) == pytest.approx(COST.step_ms(requests, rows, 20), rel=0.02)
    assert "recorded engine steps" in table.source and "of on, off, " in table.source
    assert table.fingerprint == {} and "no fingerprint" in shown and "columns: tokens per request" in shown
    assert f"speculation.step_cost={output}" in shown


def test_of_one_recorded_run_it_says_what_is_a_guess(tmp_path):
    output = tmp_path / "cost.json"
    # At most 4 requests always drafted.
    assert main(["--from-run", str(write_run(tmp_path / "on", threshold=4)), "--output", str(output)]) == 0
    guess = r"without drafts had fewer than (\d+) requests: what one takes there is a guess"
    assert int(re.search(guess, StepCost.load(output).source)[1]) >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-run", "nowhere"], "nowhere: no config.yaml there; expected a run directory of recipe.main_dapo"),
        (["--model", "here", "--requests=0,4"], "requests="),
        (["--model", "here", "--drafts=1,3"], "expected to begin with 1"),
        (["--model", "here", "--engine", "eager"], "expected a JSON object of vLLM's engine arguments"),
    ],
)
def test_what_is_wrong_is_one_line_before_an_engine_is_made(monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.setattr("sam.vllm.bench.engine.ProfiledEngine", lambda *_, **__: pytest.fail("an engine was made"))
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--output", "cost.json"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "cost.json").exists()
