"""The switch, in vLLM's scheduler: it tells the next step's placeholders, and so what is drafted and computed."""

import logging
import time

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sam.config import SpeculationConfig
from sam.drafting.position_acceptance import PositionAcceptance
from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.vllm.v2.engine import is_second_runner
from sam.vllm.warmup_cost import graph_sizes, table_of

logger = logging.getLogger(__name__)

ALL = "all"  # requests: they have drafts of one length


class Switch:
    """In place of vLLM's table of draft tokens by requests in a step, which is asked once a step. It never raises.

    Where there is a table vLLM pads no request that comes with a single token by drafts which nobody has made.

    Goodput goes by the tokens that were accepted at each position lately: what a draft promises is known in the worker.

    Attributes:
        errors: faults, of which the first is logged; each is a step without drafts.
        policy: asked and told of each step.
    """

    def __init__(self, config: SpeculationConfig, vllm_config):
        self._k = vllm_config.speculative_config.num_speculative_tokens
        goodput_only = {"step_cost": table_of(config), "graph_sizes": graph_sizes(vllm_config)}
        self.policy = make_policy(config.policy, self._k, config.batch_size_threshold, **goodput_only)
        self.errors = 0
        self._acceptance = PositionAcceptance(self._k)
        self._is_goodput = config.policy == "goodput"
        self._last: tuple[float, set[str]] = 0.0, set()  # when the last step ended, and its requests if all decoded

    def __getitem__(self, requests: int) -> int:
        """Draft tokens of each request in the next step, when this one has so many requests."""
        try:
            state = StepState(running=requests)
            budget = self.policy.plan(state).budget
            if not budget or not self._is_goodput:
                return budget
            likely = np.tile(self._acceptance.expected([ALL]), (requests, 1)).astype(np.float32)
            lengths = self.policy.choose(state, likely.ravel(), np.arange(requests + 1) * self._k)
            return round(float(lengths.mean()))
        except Exception:
            self._count_error()
            return 0

    def observe(self, scheduled, output) -> None:
        """Tell the policy of a step that has ended, by what vLLM scheduled and what came out."""
        if self._is_goodput:
            try:
                self._observe(scheduled, output, time.perf_counter())
            except Exception:
                self._count_error()

    def _observe(self, scheduled, output, now: float) -> None:
        drafts, names = scheduled.scheduled_spec_decode_tokens, set(scheduled.num_scheduled_tokens)
        drafted, accepted = sum(map(len, drafts.values())), 0
        for name, draft in drafts.items():
            right = max(0, len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1)
            self._acceptance.drafted(ALL, 0, [1] * len(draft))
            self._acceptance.compare(ALL, [1] * right + [0])
            accepted += right
        decoded = names if scheduled.total_num_scheduled_tokens == len(names) + drafted else set()
        (began, before), self._last = self._last, (now, decoded)
        if decoded and decoded == before:
            self.policy.observe(StepState(running=len(names)), drafted, accepted, (now - began) * 1e3)

    def _count_error(self) -> None:
        if self.errors == 0:
            logger.exception("the switch failed; the rollout goes on without drafts (logged once, then counted)")
        self.errors += 1


class _Switched:
    def __init__(self, vllm_config, *arguments, **keywords):
        super().__init__(vllm_config, *arguments, **keywords)
        config = SpeculationConfig.from_vllm(vllm_config)
        self._switch = None
        if config and config.method == "sam" and self.num_spec_tokens and is_second_runner(vllm_config):
            self._switch = self.dynamic_sd_lookup = Switch(config, vllm_config)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._switch:
            self._switch.observe(scheduler_output, model_runner_output)
        return outputs


class SamScheduler(_Switched, Scheduler):
    """vLLM's synchronous scheduler with the switch."""


class SamAsyncScheduler(_Switched, AsyncScheduler):
    """vLLM's asynchronous scheduler with the switch."""


def switched(scheduler_class: type) -> type:
    """vLLM's own scheduler with the switch; any other class as it is."""
    return {Scheduler: SamScheduler, AsyncScheduler: SamAsyncScheduler}.get(scheduler_class, scheduler_class)
