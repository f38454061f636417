"""Step costs of recorded runs, and a grid of them, measured on an engine of known cost that something else disturbs."""

import re

import numpy as np
import pytest

from sam.profile import ROUNDS, Grid, main, measure_cells
from sam.switch.step_cost import StepCost
from tests.sam.simulate.test_recorded import COST, write_run

GRID = Grid(requests=[1, 4, 6], drafts=[0, 2, 5], context=[64, 512])
STEPS = 4


def cost(requests, drafts, context):
    return 5.0 + 0.2 * requests + 0.1 * requests * (1 + drafts) + 0.001 * context


TRUE = np.array([[[cost(n, k, c) for c in GRID.context] for k in GRID.drafts] for n in GRID.requests])


class FakeEngine:
    """Steps of known cost; `disturbance` of a place (requests, drafts, context) and how often it has been visited says
    how many times as long they take: float or float [STEPS]."""

    def __init__(self, disturbance):
        self.visits, self._disturbance, self.running = [], disturbance, None

    def start(self, requests, context):
        assert self.running is None, "the requests before are still running"
        self.running = requests, context

    def steps(self, drafts):
        place = self.running[0], drafts, self.running[1]
        self.visits.append(place)
        return list(cost(*place) * np.broadcast_to(self._disturbance(place, self.visits.count(place)), STEPS))

    def stop(self):
        self.running = None


def test_a_disturbance_of_half_the_steps_or_two_of_three_rounds_is_not_seen(caplog):
    for disturbance in (lambda *_: np.array([1.0, 3.0, 40.0, 1.0]), lambda _, visit: 1.0 if visit == 2 else 40.0):
        engine = FakeEngine(disturbance)
        assert measure_cells(engine, GRID) == pytest.approx(TRUE)
        rounds = np.array(engine.visits).reshape(ROUNDS, TRUE.size, 3)
        assert all(len(np.unique(visits, axis=0)) == TRUE.size for visits in rounds)
    # One that is disturbed in every round costs what the next one of more work does.
    cells, wanted = measure_cells(FakeEngine(lambda place, _: 30.0 if place == (4, 2, 512) else 1.0), GRID), TRUE.copy()
    wanted[1, 1, 1] = min(TRUE[1, 2, 1], TRUE[2, 1, 1])
    assert cells == pytest.approx(wanted) and np.array_equal(GRID.table(cells).milliseconds, cells)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"1 of {TRUE.size} step costs came out above one of more work")


def test_recorded_runs_give_the_cost_of_their_steps(tmp_path, capsys):
    output = tmp_path / "cost.json"
    runs = [write_run(tmp_path / "on"), write_run(tmp_path / "off", method="off")]
    assert main(["--from-run", *map(str, runs), "--output", str(output)]) == 0
    table, shown = StepCost.load(output), capsys.readouterr().out
    for requests, rows in ((1, 1), (2, 8), (12, 12)):
        assert table.step_ms(requests, rows, 20) == pytest.approx(COST.step_ms(requests, rows, 20), rel=0.02)
    assert table.fingerprint == {} and "no fingerprint" in shown and "columns: tokens per request" in shown
    assert f"speculation.step_cost={output}" in shown
    # At most 4 requests always drafted.
    assert main(["--from-run", str(write_run(tmp_path / "always", threshold=4)), "--output", str(output)]) == 0
    guess = r"without drafts had fewer than (\d+) requests: what one takes there is a guess"
    assert int(re.search(guess, StepCost.load(output).source)[1]) >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-run", "nowhere"], "nowhere: no config.yaml there; expected a run directory of sam_recipe.main_dapo"),
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
