"""A script of verl's own, with own data and an own reward: two settings turn drafts on, and change no token."""

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

REWARD = (
    "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 7)\n"
)
PAGE = Path(__file__).parents[2] / "docs" / "use_with_your_run.md"
VERLS = "python -m verl.trainer.main_ppo "
# The page's command: verl's settings of GRPO, and what a CPU needs.
(BLOCK,) = (block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "+shared=cpu" in block)
SEARCH, _, *GRPO = shlex.split(BLOCK.partition(VERLS)[2].replace("\\\n", " "))
# So that steps, validations and the log can be looked at.
SEEN = ("trainer.test_freq=1", "trainer.val_before_train=true", "trainer.logger=[console,file]")


@pytest.fixture
def own(tmp_path):
    """A user's folder: data, a reward."""
    prompt = [{"role": "user", "content": "12 + 7 * 3 ="}]
    rows = [
        {"data_source": "mine", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": str(number)}}
        for number in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "mine.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
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
    metrics, texts, said = train(python_with_verl, own, assets, "sam", "+speculation=sam", "speculation.policy=always")
    assert "rollout worker: drafter SamProposer, verification exact" in said
    for step in (1, 2):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0
        assert metrics[step]["rollout/spec_accept_length"] > 1
        tokens = 16 * metrics[step]["response_length/mean"]  # the engine's own count has those accepted behind an end
        assert tokens <= metrics[step]["rollout/tokens"] < 1.1 * tokens
    without, same_texts, _ = train(python_with_verl, own, assets, "off", "+speculation=off")
    assert texts == same_texts and len(texts) == 2 and len(texts[0]) == 16
    assert "rollout/spec_drafted_tokens" in without[1] and without[1]["rollout/spec_drafted_tokens"] == 0
