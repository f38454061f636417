"""Two replicas of the rollout, and a user's own data, reward and agent loop: the same responses whether verl's balancer
sends them out whole, or the recipe's router chunks of them, most of which wait, with drafts.

Each replica drafts from the history that both write, and from what the other writes at the same time.
"""

from uuid import uuid4

import pandas
import pytest

from sam.record.responses import read_responses
from sam_recipe.report.runs import Run
from tests.end_to_end.runs import end, log_of, rows, start
from tests.sam.history.kept import kept

pytestmark = pytest.mark.e2e

STEPS, PROMPTS, SAMPLES, SLOTS = 2, 6, 4, 3
REWARD = """
import zlib

def judge(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    kind = zlib.crc32(solution_str.encode()) % 8
    if data_source != "own" or kind == 0:
        raise ValueError(f"no verdict for {kind}")
    return {"score": scale * (kind % 2), "acc": float(kind % 2)}
"""
LOOP = """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

class TwoDrafts(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        first = await super().run({"temperature": 1.0, "logprobs": True, "max_tokens": 16}, **kwargs)
        second = await super().run(dict(sampling_params), **kwargs)
        assert first.response_ids != second.response_ids[:16], "both drew the same numbers"
        return second
"""
OWN = (
    # Every round is an epoch over the same prompts; those beyond the batch are a surplus.
    "data.train_batch_size=4", f"data.gen_batch_size={PROMPTS}", f"data.train_max_samples={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=96",
    "actor_rollout_ref.rollout.max_model_len=256", "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    "data.train_files=own.parquet", "data.val_files=repeated.parquet",
    "reward.custom_reward_function.path=own_reward.py",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", f"trainer.test_freq={STEPS}",
)  # fmt: skip
JUDGED = ("reward.custom_reward_function.name=judge", "+reward.custom_reward_function.reward_kwargs.scale=3.0")


@pytest.fixture(scope="module")
def brought(assets, tmp_path_factory):
    """The folder in which the runs start, with what a user brings."""
    folder = tmp_path_factory.mktemp("runs")
    for name, text in {"own_reward.py": REWARD, "own_loop.py": LOOP}.items():
        (folder / name).write_text(text)
    (folder / "loops.yaml").write_text("- {name: two_drafts, _target_: own_loop.TwoDrafts}\n")
    train = pandas.read_parquet(assets / "train.parquet").head(24).assign(data_source="own")
    train["extra_info"] = [{"index": str(uuid4())} for _ in range(len(train))]
    train["agent_name"] = ["two_drafts", "single_turn_agent"] * 12
    train.to_parquet(folder / "own.parquet")
    # As AIME-2024 is published: a problem many times over, each time with its one index.
    pandas.concat([train[1:3].assign(agent_name="single_turn_agent")] * 4).to_parquet(folder / "repeated.parquet")
    return folder


@pytest.fixture(scope="module")
def runs(brought, assets):
    """By name, each with its screen: verl's balancer without drafts, and the recipe's router with drafts."""
    found = {}
    for name, overrides in {
        "verl": ("routing=verl", "speculation=off"),
        "sam": ("routing=context", "routing.chunk_tokens=24", "speculation.scope=history"),
    }.items():
        directory = brought / name
        two = ("trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}", *OWN, *JUDGED)
        dumps = f"trainer.validation_data_dir={directory / 'validation'}"
        screen = end(start(assets, directory, *two, dumps, *overrides, folder=brought), directory)
        found[name] = Run.load(directory), "\n".join(screen)
    return found


def recorded(run, step):
    return [
        [*row[:3], row.prompt_tokens.tolist(), row.response_tokens.tolist()]
        for row in read_responses(run.directory, step)
    ]


def test_chunks_that_wait_are_the_responses_that_verl_sends_out_whole(runs):
    (run, _), (verl, _) = runs["sam"], runs["verl"]
    for step in range(1, STEPS + 1):
        mine, theirs = run.metrics[step], verl.metrics[step]
        assert recorded(run, step) == recorded(verl, step)
        responses, failed = len(recorded(run, step)), mine["rollout/failed_responses"]
        assert responses + failed == mine["rollout/rounds"] * PROMPTS * SAMPLES
        assert mine["actor/grad_norm"] == theirs["actor/grad_norm"] > 0
        for key in ("rounds", "dropped_groups", "surplus_groups", "reward_all/mean", "failed_responses"):
            assert mine[f"rollout/{key}"] == theirs[f"rollout/{key}"], "the rounds of dynamic sampling"
        assert mine["rollout/routing/waiting_max"] >= SLOTS
        assert mine["rollout/routing/admissions"] > responses, "chunks"
        assert mine["rollout/preemptions"] == 0
    for step in (0, STEPS):
        validated = {key: value for key, value in run.metrics[step].items() if key.startswith("val-")}
        assert validated and validated.items() <= verl.metrics[step].items()
    log = log_of(run.directory)
    assert "routing: context, chunks of 24 tokens (routing=verl: verl's balancer)" in log
    assert "torch.distributed: training workers meet at " in log


def test_a_users_own_data_reward_and_agent_loop_are_used(runs, brought):
    outputs = {}
    for name, (run, screen) in runs.items():
        assert sum(row.get("rollout/failed_responses", 0) for row in run.metrics.values()) > 0
        assert {row["reward"] for row in rows(run.directory / "rollouts" / "1.jsonl")} == {0.0, 3.0}
        assert "responses failed in" in screen and "own_reward.py:7: ValueError: no verdict for 0" in screen
        validated = rows(run.directory / "validation" / "0.jsonl")
        outputs[name] = sorted((one["input"], one["output"]) for one in validated)
    assert outputs["sam"] == outputs["verl"]
    assert len({output for _, output in outputs["sam"]}) == len(outputs["sam"]) > 4, "a problem many times over"


def test_with_speculation_two_replicas_draft_from_what_both_write(runs):
    (sam, _), (off, _) = runs["sam"], runs["verl"]
    for step in range(1, STEPS + 1):
        # The engine steps on disk are the first replica's, the metrics are of both.
        first = float(sam.recorded[step].emitted.sum())
        assert 0 < first < sam.metrics[step]["rollout/tokens"]
    assert sum(row.get("rollout/spec_accepted_tokens", 0) for row in sam.metrics.values()) > 0
    # Each has found what the other wrote in the epoch before, in the file that both write to.
    assert sam.metrics[STEPS]["rollout/drafter/history_found_prompts"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/history_errors"] == 0
    for row in rows(sam.directory / "rollouts" / "1.jsonl"):
        texts = kept(sam.directory / "history", row["prompt_tokens"])
        own = row["response_tokens"]  # drafts behind the end were verified too, and stay in the engine's text
        assert len(own) < 2 or any(text[: len(own)] == own for text in texts)
    # And what the other wrote at the same time, which `auto` stands for with two replicas.
    log = log_of(sam.directory)
    assert "speculation.sharing: 2 replicas see" in log
    assert "sharing between replicas" not in log, "nothing fails, and the log's end with the run's is no failure"
    assert sam.metrics[STEPS]["rollout/drafter/sharing_received_tokens"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/sharing_errors"] == 0
    assert sum(row.get("rollout/spec_drafted_tokens", 0) for row in off.metrics.values()) == 0
