"""DAPO's dynamic sampling in rounds; verl's V1 trainer loads it as `trainer.v1.sampler.custom_sampler`.

A round generates `gen_batch_size` prompts. Groups whose samples all have the same metric are dropped. Rounds go on
until `train_batch_size` groups are kept, at most `max_num_gen_batches` of them; the first in dispatch order are trained
on (DAPO, arXiv 2503.14476, section 3.2, as in verl's original recipe). What verl 0.9.1's own sampler trains on depends
on the order in which responses finish.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import fmean
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from recipe.sam_dapo.rollout import parse_prompt_uid
from recipe.sam_dapo.rollout.agent_loop import FAILURE, SPAN

POLL_SECONDS = 0.05
COUNTS = ("rounds", "dropped_groups", "failed_groups", "failed_responses", "surplus_groups")
# Of a response in TransferQueue.
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "extra_fields", "data_source"]
logger = logging.getLogger(__name__)


class DapoRounds(ReplayBuffer):
    """Rounds of dynamic sampling. `sampler_kwargs` hold gen_batch_size, n (the samples of a prompt),
    max_num_gen_batches, metric (a key of the reward's extra info, or `reward`) and enable.

    A response that failed, in its agent loop or its reward, is left out of its group, as verl does; a group needs two.

    Attributes:
        rows: the responses of the last training step in dispatch order, as rollouts/<step>.jsonl has them. The
            `given_spans` [begin, end) of a response's tokens were given to the model: tools' outputs.
        validated: the same of the validation that goes on.
        on_wait: called over and over while a rollout goes on, with its partition, responses done and prompts in all.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=POLL_SECONDS, **kwargs)
        self.settings = self.sampler_kwargs
        self.rows: list[dict[str, Any]] = []
        self.validated: list[dict[str, Any]] = []
        self._counts = dict.fromkeys(COUNTS, 0)  # of the step
        self._has_warned = False
        self.on_wait: Callable[[str, int, int], None] = lambda *_: None

    def prompts_per_round(self, batch_size: int) -> int:
        """Prompts of a round, when a step trains on `batch_size` of them."""
        return self.settings.gen_batch_size if self.settings.enable else batch_size

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Return the trajectories of the first `batch_size` groups with signal, and the rounds' metrics."""
        if partition_id == "val":
            uids = self._wait_for_groups(partition_id, batch_size)[:batch_size]
            self._say_failures(partition_id, uids, f"the validation at step {global_steps}")
            self.validated += [row for _uid, row, _metrics in self._responses(partition_id, uids)]
            return self._take(partition_id, uids), {}
        self.rows = []
        self._counts = dict.fromkeys(COUNTS, 0)
        kept = []
        seen = set()
        dispatched = self.prompts_per_round(batch_size)  # by the trainer, before it calls us
        while True:
            new = [uid for uid in self._wait_for_groups(partition_id, dispatched) if uid not in seen]
            seen.update(new)
            when = f"round {self._counts['rounds'] + 1} of step {global_steps}"
            failure = self._say_failures(partition_id, new, when)
            kept += self._groups_with_signal(partition_id, new)
            self._counts["rounds"] += 1
            if len(kept) >= batch_size:
                break
            self._check_rounds_left(len(kept), batch_size, global_steps, failure)
            self.refill_fn(self.settings.gen_batch_size)
            dispatched += self.settings.gen_batch_size
        chosen = kept[:batch_size]
        self._counts["surplus_groups"] = len(kept) - batch_size
        prompts = {parse_prompt_uid(uid)[1] for uid in chosen}
        self.rows = [row | {"kept": row["prompt"] in prompts} for row in self.rows]
        self._clear_groups(partition_id, seen.difference(chosen))
        return self._take(partition_id, chosen), self._metrics()

    def _metrics(self) -> dict[str, float]:
        """Counts, and means over all responses, kept or dropped."""
        values = {**self._counts, "reward_all/mean": fmean(row["reward"] for row in self.rows)}
        right = [row["acc"] for row in self.rows if row["acc"] is not None]
        if right:
            values["acc_all/mean"] = fmean(right)
        return {f"rollout/{name}": value for name, value in values.items()}

    def _groups_with_signal(self, partition_id: str, uids: list[str]) -> list[str]:
        """Add a round's responses and counts to the step's; returns the groups that may be trained on."""
        groups = {uid: [] for uid in uids}  # the metrics of each response, by its sample
        for uid, row, metrics in self._responses(partition_id, uids):
            self.rows.append(row)
            groups[uid].append((row["sample"], metrics))
        kept = []
        for uid, group in groups.items():
            scored = len({sample for sample, _ in group})
            least = 1
            if uid in self.failure_keys[partition_id]:
                self._counts["failed_responses"] += max(0, self.settings.n - scored)
                least = 2
            if scored < least:
                self._counts["failed_groups"] += 1
            elif not self.settings.enable or self._has_signal(uid, group):
                kept.append(uid)
            else:
                self._counts["dropped_groups"] += 1
        return kept

    def _has_signal(self, uid: str, group: list[tuple[int, dict[str, float]]]) -> bool:
        """Whether the samples of a group differ in the metric."""
        return len({self._metric_of(uid, sample, metrics) for sample, metrics in group}) > 1

    def _metric_of(self, uid: str, sample: int, metrics: dict[str, float]) -> float:
        name = self.settings.metric
        if name not in metrics:
            raise ValueError(
                f"algorithm.filter_groups.metric={name}: the reward gave {', '.join(metrics)} for sample {sample} of "
                f"{uid}: set it to one of these, or let the reward return it always"
            )
        return metrics[name]

    def _check_rounds_left(self, kept: int, wanted: int, global_steps: int, failure: str | None) -> None:
        rounds = self._counts["rounds"]
        failed = self._counts["failed_groups"]
        most = self.settings.max_num_gen_batches
        if (self.settings.enable or failed) and (rounds < most or most <= 0):
            return
        others = f"; {failed} groups failed, the first of the last round: {failure}" if failure else ""
        raise RuntimeError(
            f"step {global_steps}: {rounds} rounds of {self.settings.gen_batch_size} prompts gave {kept} groups with "
            f"mixed {self.settings.metric}, {wanted} are wanted (algorithm.filter_groups.max_num_gen_batches={most}"
            f"{others}): the task is too easy or too hard for this model; change the data, raise rollout.n or "
            "data.gen_batch_size, or allow more rounds"
        )

    def _say_failures(self, partition_id: str, uids: list[str], when: str) -> str | None:
        """Say which responses failed, the first time on the screen, and return what of; raise it if all did."""
        failed = [uid for uid in uids if uid in self.failure_keys[partition_id]]
        if not failed:
            return None
        first = tq.kv_list()[partition_id][failed[0]].get(FAILURE, "train.log has the exception")
        if not self._trajectory_keys(partition_id, uids):
            raise RuntimeError(f"every response failed in {when}: {first}")
        line = f"responses failed in {when}, to {len(failed)} of {len(uids)} prompts: {first}"
        if self._has_warned:
            print(line, flush=True)
        else:
            logger.warning(line)
        self._has_warned = True
        return first

    def _wait_for_groups(self, partition_id: str, count: int) -> list[str]:
        """Wait until so many groups have ended, failed ones among them; returns all that have, in dispatch order."""
        while True:
            self._sync_metadata_from_transfer_queue()
            ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
            if len(ended) >= count:
                return sorted(ended)
            responses = {key.rpartition("_")[0] for key in self.partitions[partition_id]}
            self.on_wait(partition_id, len(responses), count)
            time.sleep(self.poll_interval)

    def _responses(self, partition_id: str, uids: list[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
        """Each response of these groups: its group, its row, and its reward and the numbers that came with it."""
        keys = self._trajectory_keys(partition_id, uids)
        if not keys:
            return
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=FIELDS)
        for key, prompt, response, mask, scores, extra, source in zip(
            keys, *(data[name] for name in FIELDS), strict=True
        ):
            uid, sample, _ = key.split("_")
            edges = np.flatnonzero(np.diff(mask.numpy() == 0, prepend=False, append=False))
            reward = float(scores.sum())
            metrics = {"reward": reward}
            extra_fields = getattr(extra, "data", extra)
            for name, value in extra_fields.get("reward_extra_info", {}).items():
                with suppress(TypeError, ValueError):  # texts are no metrics
                    metrics[name] = float(value)
            row = {
                "prompt": parse_prompt_uid(uid)[1],
                "sample": int(sample),
                "round": self._counts["rounds"],
                "prompt_tokens": prompt.tolist(),
                "response_tokens": response.tolist(),
                "given_spans": edges.reshape(-1, 2).tolist(),
                "reward": reward,
                "acc": metrics.get("acc"),
                SPAN: extra_fields.get(SPAN),
                "data_source": str(getattr(source, "data", source)),
            }
            yield uid, row, metrics

    def _trajectory_keys(self, partition_id: str, uids: list[str]) -> list[str]:
        wanted = set(uids)
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in wanted]
        return sorted(keys, key=_dispatch_order)

    def _take(self, partition_id: str, uids: list[str]) -> KVBatchMeta:
        """The groups' trajectories in dispatch order; their prompts leave the queue."""
        tq.kv_clear(partition_id=partition_id, keys=list(uids))
        keys = self._trajectory_keys(partition_id, uids)
        tags = [self.partitions[partition_id][key] for key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)


def _dispatch_order(key: str) -> tuple[str, int, int]:
    uid, sample, index = key.split("_")
    return uid, int(sample), int(index)
