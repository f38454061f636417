"""A script of verl's own, with own data, an own reward, own tools and two replicas: two settings turn drafts on, one
more the router, and no token changes."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pandas
import pytest

from sam_recipe.launch.environment import CPU
from tests.end_to_end.runs import MINUTES
from tests.end_to_end.test_turns import CALCULATOR

STEPS = 2
REWARD = (
    "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 7)\n"
)
PAGE = Path(__file__).parents[2] / "docs" / "use_with_your_run.md"
VERLS = "python -m verl.trainer.main_ppo "
# The page's command: verl's settings of GRPO, and what a CPU needs.
(BLOCK,) = (block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "+shared=cpu" in block)
SEARCH, _, *GRPO = shlex.split(BLOCK.partition(VERLS)[2].replace("\\\n", " "))
# So that steps and the log can be looked at.
SEEN = ("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[console,file]")
# Every second prompt is a conversation with a tool.
TOOLS = (
    "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_model_len=320",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=calculator.py",
    "actor_rollout_ref.rollout.multi_turn.format=sums", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
)  # fmt: skip


@pytest.fixture
def own(tmp_path):
    """A user's folder: data, a reward, a tool."""
    prompt = [{"role": "user", "content": "12 + 7 * 3 ="}]
    rows = [
        {"data_source": "mine", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": str(number)}}
        for number in range(16)
    ]
    agents = ["tool_agent", "single_turn_agent"] * 8
    pandas.DataFrame(rows).assign(agent_name=agents).to_parquet(tmp_path / "mine.parquet")
    for name, text in {"reward.py": REWARD, "calculator.py": CALCULATOR}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def train(python, own, assets, name, *overrides):
    """Run verl's main_ppo with a Python that has the wheel; its metrics by step, and its responses."""
    folder = own / name
    data = [f"data.train_files={own}/mine.parquet", f"data.val_files={own}/mine.parquet", f"assets={assets}"]
    reward = [f"reward.custom_reward_function.path={own}/reward.py", "reward.custom_reward_function.name=reward"]
    done = subprocess.run(
        [python, "-m", "verl.trainer.main_ppo", SEARCH, *GRPO, *SEEN, *data, *reward, *overrides]
        + [
            f"trainer.default_local_dir={folder}",
            f"trainer.rollout_data_dir={folder}/rollouts",
            f"hydra.run.dir={own}",
        ],
        # Ray's workers would wait for all else on the machine.
        env={**os.environ, **CPU, "RAY_worker_niceness": "0", "VERL_FILE_LOGGER_PATH": str(own / f"{name}.jsonl")},
        cwd=own,
        capture_output=True,
        text=True,
        timeout=15 * MINUTES,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    logged = [json.loads(line) for line in (own / f"{name}.jsonl").read_text().splitlines()]
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    texts = [sorted(json.loads(line)["output"] for line in file.read_text().splitlines()) for file in files]
    return {row["step"]: row["data"] for row in logged}, texts, done.stdout


@pytest.mark.e2e
def test_two_settings_turn_drafts_on_in_verls_own_trainer(python_with_verl, assets, own):
    sam = ("+speculation=sam", "speculation.policy=always", "+routing=context", "routing.chunk_tokens=24")
    metrics, texts, said = train(python_with_verl, own, assets, "sam", *sam, *TOOLS)
    without, same_texts, _ = train(python_with_verl, own, assets, "off", "+speculation=off", *TOOLS)
    assert said.count("rollout worker: drafter SamProposer, verification exact") == 2, "two replicas"
    assert texts == same_texts and len(texts) == STEPS and len(texts[0]) == 16
    assert any(re.search(r"\d\+\d is \d", text) for text in texts[0]), "the tool answered"
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0 == without[step]["rollout/spec_drafted_tokens"]
        assert metrics[step]["rollout/spec_accept_length"] > 1 < metrics[step]["rollout/spec_accept_length/turn_2"]
        assert metrics[step]["rollout/drafter/sharing_received_tokens"] > 0, "from the other replica"
        assert metrics[step]["rollout/drafter/draft_errors"] == metrics[step]["rollout/drafter/sharing_errors"] == 0
        assert metrics[step]["rollout/routing/admissions"] > 16, "chunks, and later turns"
        # What tools gave is in a response and no engine's; the engine's own count has those accepted behind an end.
        written = 16 * without[step]["response_length/mean"]
        assert 0 < without[step]["rollout/tokens"] < written
        assert without[step]["rollout/tokens"] <= metrics[step]["rollout/tokens"] < 1.1 * written
