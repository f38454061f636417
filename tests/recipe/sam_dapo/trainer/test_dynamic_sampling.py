"""Rounds of dynamic sampling against a queue in memory: what is trained on, in which order, when it gives up."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from recipe.sam_dapo.rollout import prompt_uid
from recipe.sam_dapo.rollout.agent_loop import FAILURE
from recipe.sam_dapo.trainer import dapo_trainer, dynamic_sampling
from recipe.sam_dapo.trainer.dynamic_sampling import DapoRounds


class Queue:
    """The calls of TransferQueue that the sampler makes. Groups finish at once, in an order of chance."""

    def __init__(self, accuracies, order, samples):
        self.accuracies, self.order, self.samples = accuracies, random.Random(order), samples
        self.tags, self.dispatched, self.partition = {}, 0, "train"
        self.extra = lambda accuracy: {"acc": accuracy, "pred": "x"}

    def dispatch(self, count):
        groups = range(self.dispatched, self.dispatched + count)
        self.dispatched += count
        for group in self.order.sample(groups, count):
            uid = prompt_uid(1, group)
            self.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            for sample in self.order.sample(range(self.samples), self.samples):
                self.tags[f"{uid}_{sample}_0"] = {"status": "success", "seq_len": 3}

    def kv_list(self):
        return {self.partition: dict(self.tags)}

    def kv_clear(self, partition_id, keys):
        for key in keys:
            self.tags.pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        accuracy = [self.accuracies[int(key.split("_")[0].split("-")[1])][int(key.split("_")[1])] for key in keys]
        rows = [torch.tensor([1, 2])] * len(keys)
        return {
            "prompts": rows,
            "responses": rows,
            "response_mask": [torch.tensor([1, 0])] * len(keys),  # the last token was a tool's
            "rm_scores": [torch.tensor([0.0, 2.0 * a - 1.0]) for a in accuracy],
            "data_source": ["task"] * len(keys),
            "extra_fields": [{"reward_extra_info": self.extra(a)} for a in accuracy],
        }


@pytest.fixture
def make(monkeypatch):
    """A sampler, and its queue, to which the trainer has dispatched prompts."""

    def make(accuracies, order=0, samples=2, dispatched=4, partition="train", **settings):
        queue = Queue(accuracies, order, samples)
        queue.partition = partition
        monkeypatch.setattr(dynamic_sampling, "tq", queue)
        monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", queue)
        defaults = {"enable": True, "n": 2, "metric": "acc", "max_num_gen_batches": 3, "gen_batch_size": 4}
        sampler = DapoRounds(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create(defaults | settings),
            refill_fn=queue.dispatch,
        )
        queue.dispatch(dispatched)
        return sampler, queue

    return make


def keys_of(groups):
    return [f"{prompt_uid(1, group)}_{sample}_0" for group in groups for sample in (0, 1)]


MIXED, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


@pytest.mark.parametrize("order", range(2))
def test_first_groups_with_signal_in_dispatch_order(make, order):
    groups = [RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED, RIGHT, MIXED]
    sampler, queue = make(groups, order)
    assert sampler.prompts_per_round(3) == 4, "what the trainer dispatches before it samples"
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=3)
    assert batch.keys == keys_of((1, 3, 4))
    counts = {"rounds": 2, "dropped_groups": 3, "surplus_groups": 2, "failed_groups": 0, "failed_responses": 0}
    means = {"acc_all/mean": pytest.approx(9 / 16), "reward_all/mean": pytest.approx(2 / 16)}
    assert metrics == {f"rollout/{name}": value for name, value in (counts | means).items()}
    assert queue.dispatched == 8
    assert set(queue.tags) == set(batch.keys)  # nothing else stays in the queue
    assert [row["kept"] for row in sampler.rows] == [g in (1, 3, 4) for g in range(8) for _ in (0, 1)]
    assert [row["given_spans"] for row in sampler.rows] == [[[1, 2]]] * 16


def test_who_waits_is_told_of_each_response(make):
    sampler, queue = make([MIXED] * 4)
    uid, late, told = prompt_uid(1, 2), f"{prompt_uid(1, 2)}_1_0", []
    queue.tags[uid]["status"] = "running"
    last = queue.tags.pop(late)

    def end(*progress):
        told.append(progress)
        queue.tags |= {late: last, uid: queue.tags[uid] | {"status": "finished"}}

    sampler.on_wait = end
    sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert told == [("train", 7, 4)]


SAID = "data_source 'x': /my/reward.py:3: ValueError: no number"


def fail(queue, group, *samples):
    """As a worker does when the reward raises for these samples."""
    uid = prompt_uid(1, group)
    queue.tags[uid] |= {"status": "failure", FAILURE: SAID}
    for sample in samples:
        del queue.tags[f"{uid}_{sample}_0"]


# Of three samples: the groups, what fails by group, and the rounds, failed groups and responses, and trajectories.
@pytest.mark.parametrize(
    ("group", "enable", "failed", "counts", "trajectories"),
    [
        ((1.0, 0.0, 0.0), True, {0: (0, 1, 2), 1: (0, 1)}, (2, 2, 5), 12),  # a group needs two
        ((1.0, 0.0, 0.0), True, {1: (2,)}, (1, 0, 1), 11),
        ((1.0, 1.0, 1.0), False, {2: (0, 1, 2)}, (2, 1, 3), 12),
    ],
)
def test_responses_that_fail_are_left_out_and_groups_replaced(
    make, caplog, group, enable, failed, counts, trajectories
):
    sampler, queue = make([group] * 8, samples=3, n=3, enable=enable)
    for number, samples in failed.items():
        fail(queue, number, *samples)
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert tuple(metrics[f"rollout/{name}"] for name in ("rounds", "failed_groups", "failed_responses")) == counts
    assert len(batch.keys) == trajectories
    assert set(queue.tags) == set(batch.keys)  # nor do failed groups stay, which the next step would take for its own
    assert f"to {len(failed)} of 4 prompts: {SAID}" in caplog.text


def test_a_validation_of_which_every_response_failed_ends_the_run_and_others_go_on_without_some(make, caplog):
    """Of a training step it does, too, as tests/end_to_end/test_endings.py sees when an engine dies."""
    sampler, queue = make([MIXED] * 8, partition="val")
    for group in range(4):
        fail(queue, group, 0, 1)
    with pytest.raises(RuntimeError, match=f"every response failed in .* step 1: {re.escape(SAID)}"):
        sampler.sample(global_steps=1, partition_id="val", batch_size=4)
    queue.dispatch(4)
    batch, _ = sampler.sample(global_steps=1, partition_id="val", batch_size=8)
    assert batch.keys == keys_of(range(4, 8)) and SAID in caplog.text
    found = [(row["prompt"], row["sample"], row["acc"], row["data_source"]) for row in sampler.validated]
    assert found == [(group, sample, 1.0 - sample, "task") for group in range(4, 8) for sample in (0, 1)]


def test_rounds_are_bounded_and_the_error_says_what_to_change_and_what_others_failed_of(make):
    sampler, queue = make([RIGHT] * 12)

    def refill(count):
        queue.dispatch(count)
        fail(queue, queue.dispatched - count, 0, 1)

    sampler.refill_fn = refill
    said = "3 rounds of 4 prompts gave 0 groups.*; 2 groups failed, the first of the last round: .*no number.* more"
    with pytest.raises(RuntimeError, match=said):
        sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert queue.dispatched == 12


def test_metrics_are_those_that_the_reward_gives(make):
    sampler, queue = make([MIXED] * 4, metric="reward")
    queue.extra = lambda accuracy: {"pred": "x"}
    _, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert "rollout/acc_all/mean" not in metrics and metrics["rollout/reward_all/mean"] == 0
    sampler, _ = make([MIXED] * 4, metric="accuracy")
    with pytest.raises(ValueError, match="filter_groups.metric=accuracy: the reward gave reward, acc for sample 0 of"):
        sampler.sample(1, "train", 2)


def test_a_users_sampler_need_not_know_of_rounds(monkeypatch):
    asked, verls = [], dapo_trainer.PPOTrainerSync
    monkeypatch.setattr(verls, "_add_batch_to_generate", lambda _: asked.append("verl's"))
    monkeypatch.setattr(verls, "_compute_metrics", lambda *_: None)
    trainer = object.__new__(dapo_trainer.DapoTrainer)
    trainer.replay_buffer, trainer.sam_steps = object(), []
    trainer.record = SimpleNamespace(append_metrics=lambda step, metrics: asked.append(metrics))
    trainer._add_batch_to_generate()
    trainer._compute_metrics(None, {"a": 1}, {}, 1, 0)
    assert asked == ["verl's", {"a": 1}]
