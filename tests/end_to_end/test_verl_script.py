"""A script of verl's own, with own data, an own reward and own tools: two settings turn drafts on, one more the router,
and no token changes; nor where an asynchronous trainer interrupts responses for new weights, and they go on."""

import functools
import secrets
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from sam.record.responses import read_responses
from sam_recipe.launch import fork_server
from sam_recipe.launch.environment import CPU
from sam_recipe.tiny.tokenizer import build_tokenizer
from sam_recipe.trainer import IMPORTED_ONCE
from tests.end_to_end.conftest import AGENTS
from tests.end_to_end.runs import PROMPTS, SAMPLES, STEPS, verls_run

pytestmark = pytest.mark.e2e

SAM = ("+speculation=sam", "speculation.policy=always")
# Staleness of one: a step waits for the prompts of the step before. Four slots: 32 responses take turns.
LATE = (
    "trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait",
    "trainer.v1.sampler.custom_sampler.path=impatient.py", "trainer.v1.sampler.custom_sampler.name=Impatient",
    "actor_rollout_ref.rollout.max_num_seqs=4",
)  # fmt: skip
# Then all versions of the weights are one.
COLOCATED = ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.actor.optim.lr=0")
APART = (
    "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=by_file", "ray_kwargs.ray_init.num_gpus=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def forked():
    """Ray's workers and engines come from a process that has imported all: that is half of a run's time."""
    with tempfile.TemporaryDirectory() as folder:  # short: sockets lie below
        # One that Ray made itself would not reach a process that has imported Ray before.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        python = fork_server.start(Path(folder), IMPORTED_ONCE, CPU | token)
        setting = f"++ray_kwargs.ray_init.runtime_env.py_executable={python}"
        yield functools.partial(verls_run, **{fork_server.EXECUTABLE: str(python)}, **token), setting


@pytest.fixture(scope="module")
def wanted(off):
    """The texts of the first weights by prompt, of the run without drafts; without those that its reward refused."""
    decode, found = build_tokenizer().decode, {}
    rows = [row for row in read_responses(off[0].directory, 1) if row.round == 0 and AGENTS[row.prompt] != "two_drafts"]
    for row in rows:
        found.setdefault(row.prompt, Counter())[decode(row.response_tokens, skip_special_tokens=True)] += 1
    return found


def assert_same(texts, wanted, prompts):
    """In each of the steps `texts` has each of these prompts' responses, the wanted ones."""
    assert len(texts) == prompts
    compared = {prompt: found for (_, prompt), found in texts.items() if prompt in wanted}
    for prompt, found in compared.items():
        assert len(found) == SAMPLES and wanted[prompt] <= Counter(found), prompt
    assert sum(wanted[prompt].total() for prompt in compared) > prompts * SAMPLES // 2


def test_two_settings_turn_drafts_on_in_verls_own_trainer(forked, assets, own, wanted):
    run, setting = forked
    router = ("+routing=context", "routing.chunk_tokens=24")
    metrics, texts, said = run(own, assets, "verls", *SAM, *router, setting)
    assert said.count("rollout worker: drafter SamProposer, verification exact") == 1
    assert_same({key: found for key, found in texts.items() if key[0] == 1}, wanted, 4)
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0
        assert metrics[step]["rollout/spec_accept_length"] > 1 < metrics[step]["rollout/spec_accept_length/turn_2"]
        assert metrics[step]["rollout/drafter/draft_errors"] == 0
        assert metrics[step]["rollout/routing/admissions"] > 16, "chunks, and later turns"
        # What tools gave is in a response and no engine's.
        assert 0 < metrics[step]["rollout/tokens"] < 16 * metrics[step]["response_length/mean"]


def test_responses_are_the_same_wherever_they_are_interrupted(forked, assets, own, wanted):
    run, setting = forked
    metrics, texts, _ = run(own, assets, "async", *SAM, *LATE, *COLOCATED, setting)
    assert_same(texts, wanted, PROMPTS)
    assert max(row["training/off_policy/trajectory_spans/max"] for row in metrics.values()) == 2, "none was interrupted"
    assert total(metrics, "rollout/spec_accepted_tokens") > 0 == total(metrics, "rollout/drafter/draft_errors")
    assert 0 < total(metrics, "rollout/seconds") < total(metrics, "timing_s/step"), "of a batch that never empties"


@pytest.mark.long
def test_a_rollout_with_engines_of_its_own_trains_on_what_is_one_version_late(
    python_with_verl, assets, own, wanted, monkeypatch
):
    """By a Python that has the wheel."""
    monkeypatch.setenv("PYTHONPATH", str(own), prepend=":")
    steps = 4
    overrides = (*SAM, *LATE, *APART, f"trainer.total_training_steps={steps}")
    metrics, texts, _ = verls_run(own, assets, "apart", *overrides, python=python_with_verl)
    assert sorted(metrics) == list(range(1, steps + 1))
    assert max(row["training/off_policy/trajectory_spans/max"] for row in metrics.values()) == 2, "none was interrupted"
    for row in metrics.values():
        assert row["actor/grad_norm"] > 0 and row["training/off_policy/trajectory_staleness/max"] <= 1
    assert total(metrics, "rollout/spec_accepted_tokens") > 0 == total(metrics, "rollout/drafter/draft_errors")
    assert_same({key: found for key, found in texts.items() if key[0] == 1}, wanted, 4)


def total(metrics, name):
    """Over the steps; a step whose responses are all there already has no engine steps."""
    found = [row[name] for row in metrics.values() if name in row]
    assert found
    return sum(found)
