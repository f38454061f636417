"""A run with a user's own data, reward, agent loop and chat: they are used, and speculation changes no token."""

import json
import os
import subprocess
import sys
from uuid import uuid4

import pandas
import pytest

pytestmark = pytest.mark.e2e

MINUTES = 60.0
REWARD = """
import zlib

def judge(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    kind = zlib.crc32(solution_str.encode()) % 8
    if data_source != "own" or kind == 0:
        raise ValueError(f"no verdict for {kind}")
    return {"score": scale * (kind % 2), "acc": float(kind % 2)}

def raises(data_source, **_):
    return {}["verdict"]
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


@pytest.fixture
def brought(tmp_path, assets):
    """The folder in which the runs start."""
    for name, text in {"own_reward.py": REWARD, "own_loop.py": LOOP}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "loops.yaml").write_text("- {name: two_drafts, _target_: own_loop.TwoDrafts}\n")
    train = pandas.read_parquet(assets / "train.parquet").head(24).assign(data_source="own")
    train["extra_info"] = [{"index": str(uuid4())} for _ in range(len(train))]
    train["agent_name"] = ["two_drafts", "single_turn_agent"] * 12
    train.to_parquet(tmp_path / "own.parquet")
    # As AIME-2024 is published: a problem many times over, each time with its one index.
    pandas.concat([train[1:3].assign(agent_name="single_turn_agent")] * 4).to_parquet(tmp_path / "repeated.parquet")
    return tmp_path


def run(brought, assets, name, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu", f"run_dir={brought / name}"),
        *(f"assets={assets}", "data.train_files=own.parquet", "data.val_files=repeated.parquet"),
        "reward.custom_reward_function.path=own_reward.py",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        *("data.train_batch_size=4", "data.gen_batch_size=6", "data.max_response_length=96"),
        *("actor_rollout_ref.rollout.n=4", "reward.reward_kwargs.overlong_buffer_cfg.enable=false"),
        *("actor_rollout_ref.rollout.max_model_len=256", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"),
        *(f"trainer.validation_data_dir={brought / name / 'validation'}", *overrides),
    ]
    ended = subprocess.run(
        command, cwd=brought, env=dict(os.environ), stderr=subprocess.PIPE, text=True, timeout=12 * MINUTES
    )
    log = brought / name / "train.log"
    assert log.exists(), ended.stderr
    return ended, log.read_text(errors="replace")


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_speculation_changes_no_token_of_a_users_own_run(brought, assets):
    found = {}
    for method in ("sam", "off"):
        judged = ("reward.custom_reward_function.name=judge", "+reward.custom_reward_function.reward_kwargs.scale=3.0")
        ended, log = run(brought, assets, method, f"speculation={method}", *judged)
        assert ended.returncode == 0, (ended.stderr, log[-3000:])
        (metrics,) = [row for row in rows(brought / method / "metrics.jsonl") if row["step"] == 1]
        responses = rows(brought / method / "rollouts" / "1.jsonl")
        validated = [(one["input"], one["output"]) for one in rows(brought / method / "validation" / "0.jsonl")]
        found[method] = responses, sorted(validated), metrics["actor/grad_norm"], metrics["rollout/failed_responses"]
        assert {response["reward"] for response in responses} == {0.0, 3.0}
        assert (metrics["rollout/spec_drafted_tokens"] > 0) == (method == "sam")
        assert "responses failed in" in ended.stderr and "own_reward.py:7: ValueError: no verdict for 0" in ended.stderr
    assert found["sam"] == found["off"] and found["sam"][3] > 0
    outputs = [output for _, output in found["sam"][1]]
    assert len(set(outputs)) == len(outputs) > 4


def test_a_reward_that_always_raises_is_named_after_one_round(brought, assets):
    ended, log = run(
        brought, assets, "raises", "reward.custom_reward_function.name=raises", "trainer.val_before_train=false"
    )
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "every response failed in round 1 of step 1" in last, (last, log[-3000:])
    assert f"data_source 'own': {brought}/own_reward.py:11: KeyError: 'verdict'" in last and "memory" not in last
