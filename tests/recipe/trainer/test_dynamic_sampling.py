"""Rounds of dynamic sampling against a queue in memory: what is trained on, in which order, when it gives up."""

import random
import re

import pytest
import torch
from omegaconf import OmegaConf

from sam_recipe.rollout import prompt_uid
from sam_recipe.rollout.agent_loop import FAILURE
from sam_recipe.trainer import dynamic_sampling
from sam_recipe.trainer.dynamic_sampling import DapoRounds


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
            "extra_fields": [{"reward_extra_info": self.extra(a)} for a in accuracy],
        }


def make(monkeypatch, accuracies, order=0, samples=2, **settings):
    queue = Queue(accuracies, order, samples)
    monkeypatch.setattr(dynamic_sampling, "tq", queue)
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", queue)
    defaults = {"enable": True, "n": 2, "metric": "acc", "max_num_gen_batches": 3, "gen_batch_size": 4}
    sampler = DapoRounds(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({**defaults, **settings}),
        refill_fn=queue.dispatch,
    )
    return sampler, queue


MIXED, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


@pytest.mark.parametrize("order", range(5))
def test_first_groups_with_signal_in_dispatch_order(monkeypatch, order):
    groups = [RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED, RIGHT, MIXED]
    sampler, queue = make(monkeypatch, groups, order)
    queue.dispatch(sampler.prompts_per_round(3))  # the trainer's own dispatch
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=3)
    assert batch.keys == [f"{prompt_uid(1, group)}_{sample}_0" for group in (1, 3, 4) for sample in (0, 1)]
    assert metrics["rollout/rounds"] == 2
    assert metrics["rollout/dropped_groups"] == 3
    assert metrics["rollout/surplus_groups"] == 2
    assert metrics["rollout/acc_all/mean"] == pytest.approx(9 / 16)
    assert metrics["rollout/reward_all/mean"] == pytest.approx(2 / 16)
    assert queue.dispatched == 8
    assert set(queue.tags) == set(batch.keys)  # nothing else stays in the queue
    assert [t.kept for t in sampler.last_step.trajectories] == [g in (1, 3, 4) for g in range(8) for _ in (0, 1)]


def test_rounds_are_bounded_and_the_error_says_what_to_change(monkeypatch):
    sampler, queue = make(monkeypatch, [RIGHT] * 12)
    queue.dispatch(4)
    with pytest.raises(RuntimeError, match=r"3 rounds of 4 prompts gave 0 groups.*max_num_gen_batches=3.*allow more"):
        sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert queue.dispatched == 12


def test_without_filtering_one_round_of_the_train_batch(monkeypatch):
    sampler, queue = make(monkeypatch, [RIGHT] * 2, enable=False)
    queue.dispatch(sampler.prompts_per_round(2))
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=2)
    assert len(batch.keys) == 4 and queue.dispatched == 2 and metrics["rollout/dropped_groups"] == 0
    assert [row["given_spans"] for row in sampler.last_step.rows(0, 1)] == [[[1, 2]]] * 4


SAID = "data_source 'x': /my/reward.py:3: ValueError: no number"


def fail(queue, group, *samples):
    """As a worker does when the reward raises for these samples."""
    uid = prompt_uid(1, group)
    queue.tags[uid] |= {"status": "failure", FAILURE: SAID}
    for sample in samples:
        del queue.tags[f"{uid}_{sample}_0"]


def test_groups_with_too_few_responses_are_replaced_and_counted(monkeypatch, caplog):
    sampler, queue = make(monkeypatch, [MIXED] * 8)
    queue.dispatch(4)
    fail(queue, 0, 0, 1)
    fail(queue, 1, 0)
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert metrics["rollout/failed_groups"] == 2 and metrics["rollout/rounds"] == 2
    assert metrics["rollout/failed_responses"] == 3
    assert {key.split("_")[0] for key in batch.keys} == {prompt_uid(1, group) for group in (2, 3, 4, 5)}
    assert set(queue.tags) == set(batch.keys)  # nor do failed groups stay, which the next step would take for its own
    assert f"to 2 of 4 prompts: {SAID}" in caplog.text


@pytest.mark.parametrize("enable", [True, False])
def test_a_response_that_failed_is_left_out_of_its_group(monkeypatch, enable):
    sampler, queue = make(monkeypatch, [(1.0, 0.0, 0.0)] * 4, samples=3, n=3, enable=enable)
    queue.dispatch(4)
    fail(queue, 1, 2)
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert len(batch.keys) == 11 and f"{prompt_uid(1, 1)}_2_0" not in batch.keys
    assert metrics["rollout/failed_responses"] == 1 and metrics["rollout/failed_groups"] == 0


def test_without_filtering_a_group_that_failed_is_replaced_too(monkeypatch):
    sampler, queue = make(monkeypatch, [RIGHT] * 8, enable=False)
    queue.dispatch(4)
    fail(queue, 2, 0, 1)
    batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert len(batch.keys) == 8 and metrics["rollout/rounds"] == 2


@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_round_of_which_every_response_failed_ends_the_run_with_what_they_failed_of(monkeypatch, partition):
    sampler, queue = make(monkeypatch, [MIXED] * 4)
    queue.partition = partition
    queue.dispatch(4)
    for group in range(4):
        fail(queue, group, 0, 1)
    with pytest.raises(RuntimeError, match=f"every response failed in .* step 1: {re.escape(SAID)}"):
        sampler.sample(global_steps=1, partition_id=partition, batch_size=4)
    assert queue.dispatched == 4


def test_a_validation_goes_on_without_the_responses_that_failed(monkeypatch, caplog):
    sampler, queue = make(monkeypatch, [MIXED] * 4)
    queue.partition = "val"
    queue.dispatch(4)
    fail(queue, 3, 0)
    batch, _ = sampler.sample(global_steps=1, partition_id="val", batch_size=4)
    assert len(batch.keys) == 7 and SAID in caplog.text


def test_too_few_groups_name_what_others_failed_of(monkeypatch):
    """Where an engine died, sam_recipe.launch.ending reads that from it."""
    sampler, queue = make(monkeypatch, [RIGHT] * 12)
    queue.dispatch(4)

    def refill(count):
        queue.dispatch(count)
        fail(queue, queue.dispatched - count, 0, 1)

    monkeypatch.setattr(sampler, "refill_fn", refill)
    with pytest.raises(RuntimeError, match=r"2 groups failed, the first of the last round: .*no number"):
        sampler.sample(global_steps=1, partition_id="train", batch_size=4)


def test_a_reward_without_an_accuracy_has_no_mean_accuracy(monkeypatch):
    sampler, queue = make(monkeypatch, [MIXED] * 4, metric="reward")
    queue.extra = lambda accuracy: {"pred": "x"}
    queue.dispatch(4)
    _, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    assert "rollout/acc_all/mean" not in metrics and metrics["rollout/reward_all/mean"] == 0


def test_a_metric_that_the_reward_does_not_give_is_named_with_those_it_gives(monkeypatch):
    sampler, queue = make(monkeypatch, [MIXED] * 4, metric="accuracy")
    queue.dispatch(4)
    with pytest.raises(ValueError, match="filter_groups.metric=accuracy: the reward gave reward, acc for sample 0 of"):
        sampler.sample(1, "train", 2)
