"""verl's asynchronous trainers: responses are interrupted for new weights and go on, with drafts and without."""

import json
from collections import defaultdict

import pandas
import pytest

from tests.end_to_end.test_verl_script import REWARD, train

STEPS, PROMPTS = 6, 4
# Staleness of one: a step waits for the prompts of the step before. Four slots: 32 responses take turns.
LATE = (
    "trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait",
    "data.max_response_length=256", "actor_rollout_ref.rollout.max_model_len=512",
    "actor_rollout_ref.rollout.max_num_seqs=4", f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1",
    "trainer.val_before_train=false", "trainer.v1.sampler.custom_sampler.name=Impatient",
)  # fmt: skip
# verl looks every two seconds whether enough responses have ended: a tiny model may have written all of them by then.
SAMPLER = """
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync


class Impatient(ReplayBufferAsync):
    def __init__(self, **settings):
        super().__init__(poll_interval=0.2, **settings)
"""
# verl has no checkpoint engine for a machine without devices: this one sends weights through a file.
BY_FILE = """
import asyncio, tempfile
from pathlib import Path

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class ByFile(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False):
        pass

    def prepare(self):
        return tempfile.mkdtemp()

    @classmethod
    def build_topology(cls, actors, rollouts, folders):
        return {"folder": folders[:1] * actors}, {"folder": folders[:1] * rollouts}

    def init_process_group(self, folder):
        self.folder = Path(folder)

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        torch.save({name: tensor.clone() for name, tensor in weights}, self.folder / "part")
        (self.folder / "part").rename(self.folder / "weights")

    async def receive_weights(self, global_steps=None):
        while not (self.folder / "weights").exists():
            await asyncio.sleep(0.01)
        for pair in torch.load(self.folder / "weights").items():
            yield pair
"""
APART = (
    "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=by_file", "ray_kwargs.ray_init.num_gpus=2",
)  # fmt: skip
COLOCATED = ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.actor.optim.lr=0")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's folder, with more prompts than the steps take, no two alike."""
    folder = tmp_path_factory.mktemp("own")
    rows = [
        {"data_source": "mine", "prompt": [{"role": "user", "content": f"{number} + 7 * 3 ="}],
         "reward_model": {"style": "rule", "ground_truth": str(number)}}
        for number in range(40)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "mine.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "by_file.py").write_text(BY_FILE)
    (folder / "sampler.py").write_text(SAMPLER)
    return folder


@pytest.fixture(scope="module")
def without(python_with_verl, assets, own):
    """Metrics and responses of a run without drafts. With a learning rate of 0 all versions of the weights are one."""
    return run(python_with_verl, own, assets, "off", "+speculation=off", *COLOCATED), responses(own / "off")


def run(python, own, assets, name, *overrides):
    """Its metrics by step."""
    sampler = f"trainer.v1.sampler.custom_sampler.path={own}/sampler.py"
    return train(python, own, assets, name, sampler, *LATE, *overrides)[0]


def responses(folder, steps="*"):
    """Each prompt's, sorted: which of a step's prompts ends first is the machine's."""
    found = defaultdict(list)
    for file in (folder / "rollouts").glob(f"{steps}.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            found[row["gts"]].append(row["output"])
    return {prompt: sorted(texts) for prompt, texts in found.items()}


def interrupted(metrics):
    """Whether a response of the run was written by two versions of the weights."""
    return max(metrics[step]["training/off_policy/trajectory_spans/max"] for step in metrics) == 2


def total(metrics, name):
    """Over the steps; a step whose responses are all there already has no engine steps."""
    found = [row[name] for row in metrics.values() if name in row]
    assert found
    return sum(found)


@pytest.mark.e2e
def test_responses_are_the_same_wherever_they_are_interrupted(python_with_verl, assets, own, without):
    metrics = run(python_with_verl, own, assets, "sam", "+speculation=sam", "speculation.policy=always", *COLOCATED)
    assert interrupted(metrics) and interrupted(without[0])
    assert responses(own / "sam") == without[1]
    assert sum(map(len, without[1].values())) == STEPS * PROMPTS * 4
    assert total(metrics, "rollout/spec_accepted_tokens") > 0 == total(without[0], "rollout/spec_drafted_tokens")
    assert total(metrics, "rollout/drafter/draft_errors") == 0


@pytest.mark.long
@pytest.mark.e2e
def test_a_rollout_with_engines_of_its_own_trains_on_what_is_one_version_late(
    python_with_verl, assets, own, without, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(own), prepend=":")
    metrics = run(python_with_verl, own, assets, "apart", "+speculation=sam", "speculation.policy=always", *APART)
    assert sorted(metrics) == list(range(1, STEPS + 1)) and interrupted(metrics)
    for row in metrics.values():
        assert row["actor/grad_norm"] > 0 and row["training/off_policy/trajectory_staleness/max"] <= 1
    assert total(metrics, "rollout/spec_accepted_tokens") > 0 == total(metrics, "rollout/drafter/draft_errors")
    of_first_weights, same_weights = responses(own / "apart", steps="1"), without[1]
    assert len(of_first_weights) == PROMPTS
    assert all(same_weights[prompt] == texts for prompt, texts in of_first_weights.items())
    later = responses(own / "apart", steps=str(STEPS))
    assert any(same_weights[prompt] != texts for prompt, texts in later.items()), "nothing has been learnt"
