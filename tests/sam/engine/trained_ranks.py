"""What the workers of an engine with a trained drafter on two tensor-parallel ranks do and count."""

from collections import Counter
from datetime import timedelta

from tests.sam.engine.draft_model_runs import Sometimes, prefer_model


class Ranks:
    """Mixed into vLLM's worker; the methods are called through `collective_rpc`."""

    def prepare(self) -> None:
        """Count messages and passes of each rank."""
        from vllm.distributed.parallel_state import get_tp_group

        drafter, group = self.model_runner.drafter, get_tp_group()
        broadcast, passes, propose = group.broadcast_object, drafter.trained.passes, drafter.propose
        self.counted = Counter()

        def counting(name, function):
            def call(*arguments, **keywords):
                self.counted[name] += 1
                return function(*arguments, **keywords)

            return call

        group.broadcast_object = counting("messages", broadcast)
        passes._forward = counting("passes", passes._forward)
        drafter.propose = counting("steps", propose)

    def draft(self, pattern) -> None:
        """Draft in the steps that `pattern` names, of every ten; hybrid with the model."""
        prefer_model(self.model_runner.drafter)
        self.model_runner.drafter.policy = Sometimes(pattern)

    def break_passes(self) -> None:
        """Let each pass raise, on all ranks."""
        self.model_runner.drafter.model.compute_logits = None

    def break_one(self, seconds: float) -> None:
        """Let the first pass raise on the second rank alone, which waits `seconds` for the others."""
        from vllm.distributed.parallel_state import get_tp_group

        from sam.vllm.trained import ranks

        def fail(*_unused):
            raise RuntimeError("broken on purpose")

        ranks.COMMON_FAULT = timedelta(seconds=seconds)
        if get_tp_group().rank_in_group == 1:
            self.model_runner.drafter.trained.passes._forward = fail

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters of the drafter, and what was counted since the last call."""
        counted, self.counted = dict(self.counted), Counter()
        return dict(self.model_runner.drafter.counters), counted
