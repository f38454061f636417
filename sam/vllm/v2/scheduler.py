"""The switch, in vLLM's scheduler: it tells the next step's placeholders, and so what the runner drafts and computes.

Given to vLLM as its `scheduler_cls` (sam.vllm.v2.engine.engine_arguments).
"""

import logging

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sam.config import SpeculationConfig
from sam.switch.policies import make_policy
from sam.switch.policy import StepState

logger = logging.getLogger(__name__)


class _Switched:
    """Asks the policy in every step; a fault in it is logged once and means no drafts."""

    def __init__(self, vllm_config, *arguments, **keywords):
        super().__init__(vllm_config, *arguments, **keywords)
        self._policy = None
        self.policy_errors = 0
        config = SpeculationConfig.from_vllm(vllm_config)
        if config is not None and config.method == "sam" and self.num_spec_tokens:
            limits = config.batch_size_threshold, config.hysteresis
            self._policy = make_policy(config.policy, self.num_spec_tokens, *limits)

    def _update_after_schedule(self, scheduler_output) -> None:
        if self._policy is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._plan()
        super()._update_after_schedule(scheduler_output)

    def _plan(self) -> int:
        """Draft tokens of each request in the next step."""
        try:
            return self._policy.plan(StepState(running=len(self.running))).budget
        except Exception:
            if self.policy_errors == 0:
                logger.exception("the switch failed; the rollout goes on without drafts (logged once)")
            self.policy_errors += 1
            return 0


class SamScheduler(_Switched, Scheduler):
    """vLLM's synchronous scheduler with the switch."""


class SamAsyncScheduler(_Switched, AsyncScheduler):
    """vLLM's asynchronous scheduler with the switch."""
