"""Run directories as `sam run` leaves them, here of rollouts with known step costs, and what fits them:
`sam profile`."""

import json
import re

import numpy as np
import pytest
import yaml

from sam.record.engine_steps import EngineSteps
from sam.record.responses import Recording
from sam.switch.step_cost import StepCost, linear
from sam.tools.profile import main
from sam.tools.simulate.rollout import Choice, Cluster, real, seconds, simulate
from sam.tools.simulate.run import RecordedRun, arrivals, fit_from_steps, fit_runs
from sam.tools.simulate.workload import recorded_round

COST = linear(4.0, 0.0, 0.05)
PROMPTS, SAMPLES = 4, 4
MEASURED = ("running", "drafted", "accepted", "emitted")  # columns of engine steps


def responses(seed: int) -> list[np.ndarray]:
    """Samples of a prompt that say much the same; some of them go on for long."""
    chance = np.random.default_rng(seed)
    phrases = [chance.integers(0, 200, 12) for _ in range(6)]
    lengths = chance.integers(3, 9, SAMPLES) * (1 + 3 * (np.arange(SAMPLES) == 0))
    return [np.concatenate([phrases[i] for i in chance.integers(0, 6, n)]).astype(np.int32) for n in lengths]


def write_run(directory, method="sam", policy="threshold", steps=3, threshold=4, k=3):
    """Returns the run's directory; every training step is one round, its engine steps those of the simulator."""
    for name in ("rollouts", "engine_steps"):
        (directory / name).mkdir(parents=True)
    speculation = {"method": method, "policy": policy, "num_speculative_tokens": k, "batch_size_threshold": threshold,
                   "scope": "group"}  # fmt: skip
    config = {"speculation": speculation, "actor_rollout_ref": {"rollout": {"max_num_seqs": 12}}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    choice, metrics = Choice("never" if method == "off" else policy, k, threshold), []
    for step in range(1, steps + 1):
        prompts = [np.array([7, 8, prompt], np.int32) for prompt in range(PROMPTS)]
        samples = [responses(10 * step + prompt) for prompt in range(PROMPTS)]
        work = recorded_round(Recording(prompts, samples))
        (timelines,) = simulate([work], Cluster(max_num_seqs=12), choice, COST, real())
        one_by_one(timelines[0]).save(directory, step)
        rows = [
            {"prompt": p, "sample": s, "round": 0, "prompt_tokens": prompts[p].tolist(), "response_tokens": r.tolist()}
            for p, group in enumerate(samples)
            for s, r in enumerate(group)
        ]
        (directory / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics.append(json.dumps({"step": step, "rollout/seconds": seconds(timelines) + 0.05}) + "\n")
    (directory / "metrics.jsonl").write_text("".join(metrics) + '{"step": 9, "unfinis')
    return directory


def one_by_one(timeline: np.ndarray) -> EngineSteps:
    """A timeline as the recorder writes it: a row for each engine step."""
    steps = timeline["steps"]
    spread = np.repeat(np.diff(timeline["end_ms"], prepend=0.0) / steps, steps)
    counts = {name: np.repeat(timeline[name] // steps, steps) for name in ("drafted", "accepted", "emitted")}
    ends = 100.0 + np.cumsum(spread) / 1e3
    return EngineSteps(end_s=ends, step_ms=spread, running=np.repeat(timeline["running"], steps), **counts)


@pytest.mark.parametrize("drafting", [0.5, 0.0])
def test_known_costs_come_out_of_noisy_steps_of_which_some_were_held_up(drafting):
    """4 ms, 0.05 for each row, 0.02 for each request, 1.5 with drafts, 0.3 for each request that comes."""
    chance = np.random.default_rng(0)
    running = chance.integers(1, 65, 4000)
    drafted = np.where(chance.random(4000) < drafting, chance.integers(1, 4 * running + 1), 0)
    admitted = np.where(chance.random(4000) < 0.05, running, 0)
    took = 4 + 0.05 * (running + drafted) + 0.02 * running + 1.5 * (drafted > 0) + 0.3 * admitted
    took = took * (1 + 0.05 * chance.standard_normal(4000)) + np.where(chance.random(4000) < 0.01, 60.0, 0.0)
    fitted = fit_from_steps(np.array([running, drafted, took, admitted, np.zeros(4000)]))
    ratio = fitted.cost.step_ms(64, 64, 1)[0] / fitted.cost.step_ms(1, 1, 1)[0]
    assert ratio == pytest.approx(8.48 / 4.07, rel=0.06) and fitted.drafts_seen == (drafting > 0)
    total = sum(fitted.cost.step_ms(r, r + d, 1)[0] for r, d in zip(running, drafted, strict=True))
    assert total + fitted.admit_ms * admitted.sum() == pytest.approx(took.sum(), rel=0.02)
    steps = EngineSteps(end_s=[0.01, 0.02, 0.03], step_ms=np.full(3, 10.0), running=[1, 4, 3])
    assert arrivals(steps, 4) == pytest.approx([0, 10, 10, 10]), "read from running requests"
    with pytest.raises(ValueError, match="3 recorded engine steps: expected at least 20"):
        fit_from_steps(np.ones((5, 3)))


def test_a_machine_that_was_slower_for_a_while_does_not_change_what_steps_cost(tmp_path):
    run = RecordedRun.load(write_run(tmp_path / "run", steps=4))
    even, _ = fit_runs([run])
    for step in (2, 3):
        steps = EngineSteps.load(run.directory, step)
        EngineSteps(step_ms=3 * steps.step_ms, **{name: getattr(steps, name) for name in MEASURED}).save(
            run.directory, step
        )
    fitted, _ = fit_runs([run])
    assert "the machine was up to 3.0x slower in some training steps" in fitted.cost.source
    of_rows = [one.cost.step_ms(12, 12, 20)[0] / one.cost.step_ms(1, 1, 20)[0] for one in (even, fitted)]
    assert of_rows[0] == pytest.approx(of_rows[1], rel=0.02)
    assert fitted.cost.step_ms(1, 1, 20)[0] > 1.5 * even.cost.step_ms(1, 1, 20)[0], "the run's mean speed"


def test_a_run_that_cannot_be_simulated_is_named(tmp_path):
    directory = write_run(tmp_path / "run", steps=1)
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["speculation"] |= {"method": "hybrid", "draft_model": "DIR"}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    run = RecordedRun.load(directory)
    assert fit_runs([run])[0].drafts_seen and not run.is_simulated
    with pytest.raises(ValueError, match="drafts of hybrid are not simulated: name a run with sam or off"):
        run.choice  # noqa: B018
    (directory / "engine_steps" / "1.npz").unlink()
    with pytest.raises(ValueError, match="no training step with rollouts/ and engine_steps/ has finished there"):
        RecordedRun.load(directory)
    write_run(other := tmp_path / "other", steps=1)
    (other / "config.yaml").write_text("{speculation: {method: sam}, actor_rollout_ref: {rollout: {max_num_seqs: -1}}}")
    with pytest.raises(ValueError, match="config.yaml: not this version's settings .rollout.max_num_seqs=-1: expected"):
        RecordedRun.load(other).cluster()
    for content in ("speculation: [", "- a", "speculation: sam"):
        (directory / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="config.yaml: not the config of a run of sam run"):
            RecordedRun.load(directory)


def test_profile_gives_the_cost_of_recorded_steps(tmp_path, capsys):
    output = tmp_path / "cost.json"
    runs = [write_run(tmp_path / "on"), write_run(tmp_path / "off", method="off")]
    assert main([*map(str, runs), "--output", str(output)]) == 0
    table, shown = StepCost.load(output), capsys.readouterr().out
    for requests, rows in ((1, 1), (2, 8), (12, 12)):
        assert table.step_ms(requests, rows, 20) == pytest.approx(COST.step_ms(requests, rows, 20), rel=0.02)
    assert "an engine of any model or device" in shown and "columns: tokens per request" in shown
    assert f"speculation.step_cost={output}" in shown
    # At most 4 requests always drafted.
    assert main([str(write_run(tmp_path / "always", threshold=4)), "--output", str(output)]) == 0
    guess = r"without drafts had fewer than (\d+) requests: what one takes there is a guess"
    assert int(re.search(guess, StepCost.load(output).source)[1]) >= 4
