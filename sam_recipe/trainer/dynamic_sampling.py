"""DAPO's dynamic sampling in rounds; verl's V1 trainer loads it as `trainer.v1.sampler.custom_sampler`.

A round generates `gen_batch_size` prompts. Groups whose samples all have the same metric are dropped. Rounds go on
until `train_batch_size` groups are kept, at most `max_num_gen_batches` of them; the first in dispatch order are trained
on (DAPO, arXiv 2503.14476, section 3.2, as in verl's original recipe). What verl 0.9.1's own sampler trains on depends
on the order in which responses finish.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from sam_recipe.rollout import parse_prompt_uid, sample_seed
from sam_recipe.rollout.agent_loop import FAILURE

POLL_SECONDS = 0.05
logger = logging.getLogger(__name__)


@dataclass
class Trajectory:
    """One generated response, and its reward and metrics."""

    uid: str
    sample: int
    round: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    given_spans: list[list[int]]  # [begin, end) of the response's tokens that were given to the model: tools' outputs
    reward: float
    metrics: dict[str, float]
    kept: bool = False


@dataclass
class SampledStep:
    """The responses and group counts of one training step, in dispatch order."""

    rounds: int = 0
    dropped_groups: int = 0
    failed_groups: int = 0
    failed_responses: int = 0
    surplus_groups: int = 0
    failure: str | None = None  # of the last round
    trajectories: list[Trajectory] = field(default_factory=list)

    def rows(self, run_seed: int, step: int) -> list[dict[str, Any]]:
        """As rollouts/<step>.jsonl has them, of the training step `step`."""
        rows = []
        for one in self.trajectories:
            row = {**vars(one), "acc": one.metrics.get("acc", 0.0), "prompt": parse_prompt_uid(one.uid)[1]}
            del row["uid"], row["metrics"]
            rows.append(row | {"seed": sample_seed(run_seed, "train", step, row["prompt"], one.sample)})
        return rows

    def metrics(self) -> dict[str, float]:
        """Counts, and means over all responses, kept or dropped."""
        values = {f"rollout/{name}": count for name, count in vars(self).items() if isinstance(count, int)}
        values["rollout/reward_all/mean"] = fmean(one.reward for one in self.trajectories)
        if right := [one.metrics["acc"] for one in self.trajectories if "acc" in one.metrics]:
            values["rollout/acc_all/mean"] = fmean(right)
        return values


class DapoRounds(ReplayBuffer):
    """Rounds of dynamic sampling. `sampler_kwargs` hold gen_batch_size, n (the samples of a prompt),
    max_num_gen_batches, metric (a key of the reward's extra info, or `reward`) and enable.

    A response that failed, in its agent loop or its reward, is left out of its group, as verl does; a group needs two.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=POLL_SECONDS, **kwargs)
        settings = self.sampler_kwargs
        self.enabled = bool(settings.enable)
        self.round_size = int(settings.gen_batch_size)
        self.max_rounds = int(settings.max_num_gen_batches)
        self.samples = int(settings.n)
        self.metric = str(settings.metric)
        self._has_warned = False

    def prompts_per_round(self, batch_size: int) -> int:
        """Prompts of a round, when a step trains on `batch_size` of them."""
        return self.round_size if self.enabled else batch_size

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Return the trajectories of the first `batch_size` groups with signal, and the rounds' metrics."""
        if partition_id == "val":
            uids = self._wait_for_groups(partition_id, batch_size)[:batch_size]
            self._say_failures(partition_id, uids, f"the validation at step {global_steps}")
            return self._take(partition_id, uids), {}

        step = self.last_step = SampledStep()
        # The trainer has dispatched the first round before it calls us.
        dispatched, kept, seen = self.prompts_per_round(batch_size), [], set()
        while True:
            new = [uid for uid in self._wait_for_groups(partition_id, dispatched) if uid not in seen]
            seen.update(new)
            step.failure = self._say_failures(partition_id, new, f"round {step.rounds + 1} of step {global_steps}")
            kept += self._groups_with_signal(step, partition_id, new)
            step.rounds += 1
            if len(kept) >= batch_size:
                break
            self._check_rounds_left(step, len(kept), batch_size, global_steps)
            self.refill_fn(self.round_size)
            dispatched += self.round_size
        chosen = set(kept[:batch_size])
        step.surplus_groups = len(kept) - len(chosen)
        for trajectory in step.trajectories:
            trajectory.kept = trajectory.uid in chosen
        self._clear_groups(partition_id, seen - chosen)
        return self._take(partition_id, kept[:batch_size]), step.metrics()

    def _groups_with_signal(self, step: SampledStep, partition_id: str, uids: list[str]) -> list[str]:
        """Add a round's responses and counts to the step; returns the groups that may be trained on."""
        kept, groups = [], self._read_groups(partition_id, uids, step.rounds)
        for uid in uids:
            group = groups[uid]
            step.trajectories.extend(group)
            scored = len({trajectory.sample for trajectory in group})
            failed = uid in self.failure_keys[partition_id]
            step.failed_responses += failed * max(0, self.samples - scored)
            if scored < 1 + failed:
                step.failed_groups += 1
            elif not self.enabled or len({self._metric_of(trajectory) for trajectory in group}) > 1:
                kept.append(uid)
            else:
                step.dropped_groups += 1
        return kept

    def _metric_of(self, trajectory: Trajectory) -> float:
        known = {"reward": trajectory.reward, **trajectory.metrics}
        if self.metric not in known:
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward gave {', '.join(known)} for sample "
                f"{trajectory.sample} of {trajectory.uid}: set it to one of these, or let the reward return it always"
            )
        return known[self.metric]

    def _check_rounds_left(self, step: SampledStep, kept: int, wanted: int, global_steps: int) -> None:
        if (self.enabled or step.failed_groups) and (step.rounds < self.max_rounds or self.max_rounds <= 0):
            return
        failed = f"; {step.failed_groups} groups failed, the first of the last round: {step.failure}"
        raise RuntimeError(
            f"step {global_steps}: {step.rounds} rounds of {self.round_size} prompts gave {kept} groups with mixed "
            f"{self.metric}, {wanted} are wanted (algorithm.filter_groups.max_num_gen_batches={self.max_rounds}"
            f"{failed if step.failure else ''}): the task is too easy or too hard for this model; "
            "change the data, raise rollout.n or data.gen_batch_size, or allow more rounds"
        )

    def _say_failures(self, partition_id: str, uids: list[str], when: str) -> str | None:
        """Say which responses failed, the first time on the screen, and return what of; raise it if all did."""
        failed = [uid for uid in uids if uid in self.failure_keys[partition_id]]
        if not failed:
            return None
        first = tq.kv_list()[partition_id][failed[0]].get(FAILURE, "train.log has the exception")
        if not self._trajectory_keys(partition_id, uids):
            raise RuntimeError(f"every response failed in {when}: {first}")
        said = f"responses failed in {when}, to {len(failed)} of {len(uids)} prompts: {first}"
        print(said, flush=True) if self._has_warned else logger.warning(said)
        self._has_warned = True
        return first

    def _wait_for_groups(self, partition_id: str, count: int) -> list[str]:
        """Wait until so many groups have ended, failed ones among them; returns all that have, in dispatch order."""
        while True:
            self._sync_metadata_from_transfer_queue()
            ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
            if len(ended) >= count:
                return sorted(ended)
            time.sleep(self.poll_interval)

    def _read_groups(self, partition_id: str, uids: list[str], round_index: int) -> dict[str, list[Trajectory]]:
        groups: dict[str, list[Trajectory]] = {uid: [] for uid in uids}
        keys = self._trajectory_keys(partition_id, uids)
        if not keys:
            return groups
        fields = ["prompts", "responses", "response_mask", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
        for key, prompt, response, mask, scores, extra in zip(keys, *(data[name] for name in fields), strict=True):
            uid, sample, _ = key.split("_")
            edges = np.flatnonzero(np.diff(mask.numpy() == 0, prepend=False, append=False))
            tokens, metrics = (prompt.tolist(), response.tolist(), edges.reshape(-1, 2).tolist()), {}
            for name, value in getattr(extra, "data", extra).get("reward_extra_info", {}).items():
                with suppress(TypeError, ValueError):  # texts are no metrics
                    metrics[name] = float(value)
            groups[uid].append(Trajectory(uid, int(sample), round_index, *tokens, float(scores.sum()), metrics))
        return groups

    def _trajectory_keys(self, partition_id: str, uids: list[str]) -> list[str]:
        keys, wanted = self.partitions[partition_id], set(uids)
        return sorted((key for key in keys if key.split("_")[0] in wanted), key=_dispatch_order)

    def _take(self, partition_id: str, uids: list[str]) -> KVBatchMeta:
        """The groups' trajectories in dispatch order; their prompts leave the queue."""
        tq.kv_clear(partition_id=partition_id, keys=list(uids))
        keys = self._trajectory_keys(partition_id, uids)
        tags = [self.partitions[partition_id][key] for key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)


def _dispatch_order(key: str) -> tuple[str, int, int]:
    uid, sample, index = key.split("_")
    return uid, int(sample), int(index)
