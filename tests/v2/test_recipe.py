"""The recipe with vLLM's second model runner: a step with `sam`, router and chunks, and the same with `off`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import SHORT, end, log_of, metrics, responses, start
from tests.v2.second_on_cpu import ON_IMPORT

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
# Two prompts, short responses, short drafts: the interpreter takes most of the time.
FEW = (
    "trainer.total_training_steps=1", "data.train_batch_size=2", "data.gen_batch_size=2", "data.max_response_length=40",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "speculation.num_speculative_tokens=3",
)  # fmt: skip
RESPONSES = 8


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs the recipe to its end: its folder."""
    folder = tmp_path_factory.mktemp("recipe")
    assets = folder / "assets"
    subprocess.run([sys.executable, "-m", "recipe.sam_dapo.tiny.assets", "--output", assets], check=True)
    (folder / "sitecustomize.py").write_text(ON_IMPORT)
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
        "RAY_worker_niceness": "0",  # Ray's workers would wait for all else on the machine
    }  # fmt: skip

    def run(method: str, *overrides: str) -> Path:
        words = (*SHORT, *FEW, f"speculation={method}", *overrides)
        end(start(assets, folder / method, *words, **variables), folder / method)
        return folder / method

    return run


def test_a_step_trains_on_the_same_responses(train):
    sam = train("sam", "routing=context", "routing.chunk_tokens=16")
    assert "drafter SamSpeculator" in log_of(sam)
    (drafted,) = metrics(sam)
    assert drafted["rollout/spec_accepted_tokens"] > 0 == drafted["rollout/drafter/draft_errors"]
    assert drafted["rollout/routing/admissions"] > RESPONSES, "chunks"
    off = train("off")
    assert responses(sam, 1) == responses(off, 1) and len(responses(sam, 1)) == RESPONSES
