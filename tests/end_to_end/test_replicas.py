"""Two replicas of the rollout on a CPU, by verl's own key: the same responses with and without speculation, and whether
verl's balancer sends out whole responses or the recipe's router chunks of them, most of which wait.

With speculation each replica drafts from the history that both write, and from what the other writes at the same time.
"""

import json
import os
import subprocess
import sys

import pytest

from recipe.report.runs import Run
from sam.routing.decision_log import replay
from tests.sam.history.kept import kept

pytestmark = pytest.mark.e2e

MINUTES = 60.0
STEPS, PROMPTS, SAMPLES, SLOTS = 2, 6, 4, 3


def train(assets, folder, name, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu"),
        *("trainer.n_gpus_per_node=2", f"run_dir={folder / name}", f"assets={assets}"),
        # Every round is an epoch over the same prompts; those beyond the batch are a surplus.
        *("data.train_batch_size=4", f"data.gen_batch_size={PROMPTS}", f"data.train_max_samples={PROMPTS}"),
        *(f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=96"),
        f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
        # The model is hardly ever right: groups differ in how long their responses are.
        *("reward.reward_kwargs.overlong_buffer_cfg.len=80", "algorithm.filter_groups.metric=reward"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", f"trainer.test_freq={STEPS}"),
        *("trainer.val_before_train=true", *overrides),
    ]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ), timeout=10 * MINUTES)
    assert ended.returncode == 0, (ended.stderr[-1000:], (folder / name / "train.log").read_text()[-3000:])
    return Run.load(folder / name)


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """By name: verl's balancer, and the recipe's router with and without drafts."""
    folder, chunks = tmp_path_factory.mktemp("runs"), ("routing=context", "routing.chunk_tokens=24")
    return {
        "verl": train(assets, folder, "verl", "routing=verl", "speculation=off"),
        "off": train(assets, folder, "off", *chunks, "speculation=off"),
        "sam": train(assets, folder, "sam", *chunks, "speculation.scope=history"),
    }


def recorded(run, step):
    return [[*row[:3], row.prompt_tokens.tolist(), row.response_tokens.tolist()] for row in run.responses(step)]


@pytest.mark.parametrize("name", ["off", "sam"])
def test_chunks_that_wait_are_the_responses_that_verl_sends_out_whole(runs, name):
    run, verl = runs[name], runs["verl"]
    for step in range(1, STEPS + 1):
        assert len(recorded(verl, step)) >= PROMPTS * SAMPLES and recorded(run, step) == recorded(verl, step)
        mine, theirs = run.metrics[step], verl.metrics[step]
        assert mine["actor/grad_norm"] == theirs["actor/grad_norm"] > 0
        for key in ("rounds", "dropped_groups", "surplus_groups", "reward_all/mean"):
            assert mine[f"rollout/{key}"] == theirs[f"rollout/{key}"], "the rounds of dynamic sampling"
        assert mine["rollout/routing/waiting_max"] >= SLOTS
        assert mine["rollout/routing/admissions"] > len(run.responses(step)), "chunks"
        assert mine["rollout/preemptions"] == 0
    for step in (0, STEPS):
        validated = {key: value for key, value in run.metrics[step].items() if key.startswith("val-")}
        assert validated and validated.items() <= verl.metrics[step].items()
    log = (run.directory / "train.log").read_text()
    assert (
        "routing: context, chunks of 24 tokens (routing=verl: verl's balancer)" in log
        and "torch.distributed: training workers meet at " in log
    )
    lines = (run.directory / "routing.jsonl").read_text().splitlines()
    assert replay(lines) > sum(row.get("rollout/routing/admissions", 0) for row in run.metrics.values()), "validation"
    assert [json.loads(line)[1] for line in lines].count("abort") == 0


def test_with_speculation_two_replicas_draft_from_what_both_write(runs):
    sam, off = runs["sam"], runs["off"]
    for step in range(1, STEPS + 1):
        # The engine steps on disk are the first replica's, the metrics are of both.
        first = float(sam.engine_steps(step).emitted.sum())
        assert 0 < first < sam.metrics[step]["rollout/tokens"]
    assert sum(row.get("rollout/spec_accepted_tokens", 0) for row in sam.metrics.values()) > 0
    # Each has found what the other wrote in the epoch before, in the file that both write to.
    assert sam.metrics[STEPS]["rollout/drafter/history_found_prompts"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/history_errors"] == 0
    rows = [json.loads(line) for line in (sam.directory / "rollouts" / "1.jsonl").read_text().splitlines()]
    for row in rows:
        texts = kept(sam.directory / "history", row["prompt_tokens"])
        own = row["response_tokens"]  # drafts behind the end were verified too, and stay in the engine's text
        assert len(own) < 2 or any(text[: len(own)] == own for text in texts)
    # And what the other wrote at the same time, which `auto` stands for with two replicas.
    log = (sam.directory / "train.log").read_text()
    assert "speculation.sharing: 2 replicas see" in log
    assert "sharing between replicas" not in log, "nothing fails, and the log's end with the run's is no failure"
    assert sam.metrics[STEPS]["rollout/drafter/sharing_received_tokens"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/sharing_errors"] == 0
    assert sum(row.get("rollout/spec_drafted_tokens", 0) for row in off.metrics.values()) == 0
