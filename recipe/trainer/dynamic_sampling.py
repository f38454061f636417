"""DAPO's dynamic sampling in rounds; verl's V1 trainer loads it as `trainer.v1.sampler.custom_sampler`.

A round generates `gen_batch_size` prompts. Groups whose samples all have the same metric carry no signal and
are dropped. Rounds go on until `train_batch_size` groups are kept, at most `max_num_gen_batches` of them; the
first `train_batch_size` in dispatch order are trained on (DAPO, arXiv 2503.14476, section 3.2, as in verl's
original recipe). verl 0.9.1's own V1 sampler refills prompt by prompt as groups finish and never gives up, so
what it trains on depends on the order in which responses finish.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from recipe.rollout.agent_loop import FAILURE

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
        self.last_step = SampledStep()
        self._has_warned = False

    def prompts_per_round(self, batch_size: int) -> int:
        """Prompts of a round, when a step trains on `batch_size` of them."""
        return self.round_size if self.enabled else batch_size

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Return the trajectories of the first `batch_size` groups with signal, and the rounds' metrics."""
        if partition_id == "val":
            self._wait_for_groups(partition_id, batch_size)
            uids = sorted(self._terminal_groups(partition_id))[:batch_size]
            self._say_failures(partition_id, uids, f"the validation at step {global_steps}")
            return self._take(partition_id, uids), {}

        step = SampledStep()
        self.last_step = step
        # The trainer has dispatched the first round before it calls us.
        dispatched, kept, seen = self.prompts_per_round(batch_size), [], set()
        while True:
            self._wait_for_groups(partition_id, dispatched)
            new = sorted(self._terminal_groups(partition_id) - seen)
            seen.update(new)
            step.failure = self._say_failures(partition_id, new, f"round {step.rounds + 1} of step {global_steps}")
            groups = self._read_groups(partition_id, new, step.rounds)
            step.rounds += 1
            for uid in new:
                step.trajectories.extend(groups[uid])
                scored = len({trajectory.sample for trajectory in groups[uid]})
                failed = uid in self.failure_keys[partition_id]
                step.failed_responses += failed * max(0, self.samples - scored)
                if scored < 1 + failed:
                    step.failed_groups += 1
                elif not self.enabled or self._has_signal(groups[uid]):
                    kept.append(uid)
                else:
                    step.dropped_groups += 1
            if len(kept) >= batch_size:
                break
            self._check_rounds_left(step, len(kept), batch_size, global_steps)
            self.refill_fn(self.round_size)
            dispatched += self.round_size
        return self._finish(step, partition_id, seen, kept, batch_size)

    def _finish(self, step: SampledStep, partition_id: str, seen: set[str], kept: list[str], batch_size: int):
        chosen = set(kept[:batch_size])
        step.surplus_groups = len(kept) - len(chosen)
        for trajectory in step.trajectories:
            trajectory.kept = trajectory.uid in chosen
        metrics = {
            "rollout/rounds": step.rounds,
            "rollout/dropped_groups": step.dropped_groups,
            "rollout/failed_groups": step.failed_groups,
            "rollout/failed_responses": step.failed_responses,
            "rollout/surplus_groups": step.surplus_groups,
            "rollout/reward_all/mean": fmean(trajectory.reward for trajectory in step.trajectories),
        }
        if right := [trajectory.metrics["acc"] for trajectory in step.trajectories if "acc" in trajectory.metrics]:
            metrics |= {"rollout/acc_all/mean": fmean(right)}
        self._clear_groups(partition_id, seen - chosen)
        return self._take(partition_id, kept[:batch_size]), metrics

    def _has_signal(self, group: list[Trajectory]) -> bool:
        return len({self._metric_of(trajectory) for trajectory in group}) > 1

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
        if not self._trajectory_keys(partition_id, set(uids)):
            raise RuntimeError(f"every response failed in {when}: {first}")
        said = f"responses failed in {when}, to {len(failed)} of {len(uids)} prompts: {first}"
        print(said, flush=True) if self._has_warned else logger.warning(said)
        self._has_warned = True
        return first

    def _terminal_groups(self, partition_id: str) -> set[str]:
        return self.finished_keys[partition_id] | self.failure_keys[partition_id]

    def _wait_for_groups(self, partition_id: str, count: int) -> None:
        self._sync_metadata_from_transfer_queue()
        while len(self._terminal_groups(partition_id)) < count:
            time.sleep(self.poll_interval)
            self._sync_metadata_from_transfer_queue()

    def _read_groups(self, partition_id: str, uids: list[str], round_index: int) -> dict[str, list[Trajectory]]:
        groups: dict[str, list[Trajectory]] = {uid: [] for uid in uids}
        keys = self._trajectory_keys(partition_id, set(uids))
        if not keys:
            return groups
        fields = ["prompts", "responses", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
        for key, prompt, response, scores, extra in zip(keys, *(data[name] for name in fields), strict=True):
            uid, sample, _ = key.split("_")
            tokens, metrics = (prompt.tolist(), response.tolist()), {}
            for name, value in getattr(extra, "data", extra).get("reward_extra_info", {}).items():
                with suppress(TypeError, ValueError):  # texts are no metrics
                    metrics[name] = float(value)
            groups[uid].append(Trajectory(uid, int(sample), round_index, *tokens, float(scores.sum()), metrics))
        return groups

    def _trajectory_keys(self, partition_id: str, uids: set[str]) -> list[str]:
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]
        return sorted(keys, key=_dispatch_order)

    def _take(self, partition_id: str, uids: list[str]) -> KVBatchMeta:
        """The groups' trajectories in dispatch order; their prompts leave the queue."""
        tq.kv_clear(partition_id=partition_id, keys=list(uids))
        keys = self._trajectory_keys(partition_id, set(uids))
        tags = [self.partitions[partition_id][key] for key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)


def _dispatch_order(key: str) -> tuple[str, int, int]:
    uid, sample, index = key.split("_")
    return uid, int(sample), int(index)
