"""The whole recipe with real verl, Ray and vLLM: ended in four ways, resumed after each, it repeats an undisturbed run;
a fifth, a rollout server's death, ends the run of test_smoke.py.

Each start but the last goes on to the end of one training step and is ended in the next, so that a start serves both
for what it ends with and for what the one before left.
"""

import json
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.runs import (
    MINUTES,
    SHORT,
    end,
    kill,
    leaves_nothing,
    log_of,
    metrics,
    outside,
    responses,
    start,
    wait_for_step,
)  # fmt: skip

pytestmark = pytest.mark.e2e

STEPS = 5
LARGEST = "actor/optim_world_size_1_rank_0.pt"  # of a checkpoint
SETTINGS = (*SHORT, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1")


def fill_disk(run_directory, step):
    """The kernel answers every write to the checkpoint's largest file as on a full disk."""
    file = run_directory / "checkpoints" / f"global_step_{step}" / LARGEST
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")


ENDINGS = (
    (130, "interrupted, in step 2; ", lambda run, _: run.send_signal(signal.SIGINT)),
    (1, "error: the vLLM engine (process ", lambda run, _: kill(run, "VLLM::EngineCore")),
    (-signal.SIGKILL, "error: the supervisor (process ", lambda run, _: run.kill()),
    (1, "error: no space left on the disk of ", lambda _, run_directory: fill_disk(run_directory, STEPS)),
)


def against_stock(run_directory):
    """What `sam bench --run` finds of a run by engine, with real engines."""
    command = [sys.executable, "-m", "sam_recipe.command_line", "bench", "--run", str(run_directory), "--rounds", "1"]
    subprocess.run(command, check=True, timeout=10 * MINUTES)
    return {row["variant"]: row for row in json.loads((run_directory.parent / "stock.json").read_text())["rows"]}


def test_a_run_that_ends_in_four_ways_repeats_an_undisturbed_one(assets, tmp_path):
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    before = outside(disturbed)
    for step, (code, said, act) in enumerate(ENDINGS, start=1):
        # Once without a HOME to write to.
        run = start(assets, disturbed, *SETTINGS, **({"HOME": "/nonexistent"} if step == 2 else {}))
        wait_for_step(run, disturbed, step)
        act(run, disturbed)
        _, screen = run.communicate(timeout=MINUTES if step < len(ENDINGS) else 5 * MINUTES)
        *progress, last = screen.splitlines()
        assert run.returncode == code and last.startswith(said), (screen, log_of(disturbed)[-3000:])
        assert f"; log: {disturbed}/train.log; " in last and last.endswith(f"same command goes on after step {step}")
        said = ("starting", "training: ", "warning: ", f"resumed from step {step - 1} of {disturbed}")
        assert all(line.startswith(said) for line in progress), screen
        assert (said[-1] in progress) == (step > 1) and "changed since then" not in screen
        assert log_of(disturbed).endswith(f"{last}\n")
        assert leaves_nothing(disturbed, before), outside(disturbed) - before
        assert not (disturbed / "rollouts" / f"{step + 2}.jsonl").exists()

    (disturbed / "checkpoints" / f"global_step_{STEPS}" / LARGEST).unlink()  # as freed
    # While another run without speculation goes on beside it.
    resumed = start(assets, disturbed, *SETTINGS)
    for run, directory in (
        (start(assets, undisturbed, *SETTINGS, "speculation=off"), undisturbed),
        (resumed, disturbed),
    ):
        last = end(run, directory)[-1]
        assert last.startswith(f"finished after {STEPS} steps; log: {directory}/train.log"), last
    assert leaves_nothing(disturbed, before), outside(disturbed) - before
    assert "Traceback" not in log_of(undisturbed), "a run that ended well"
    assert len({path.name.rpartition("-")[2] for path in (disturbed / "wandb").glob("offline-run-*")}) == 1

    for step in range(1, STEPS + 1):
        assert responses(disturbed, step) == responses(undisturbed, step)
    assert [row["step"] for row in metrics(disturbed)] == list(range(1, STEPS + 1))
    for key in ("actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"):
        assert metrics(disturbed)[-1][key] == metrics(undisturbed)[-1][key]
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(disturbed)) > 0
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(undisturbed)) == 0

    # Stock vLLM's engine takes this config's arguments, and all emit what the run recorded.
    found = against_stock(disturbed)
    assert list(found) == ["stock", "off", "sam"] and leaves_nothing(disturbed, before)
    assert {row["responses"] for row in found.values()} == {16}
