"""The asynchronous loop of vLLM's first model runner; for sam alone as its drafter `ngram_gpu`.

    _update_states   waits for the last step's tokens, where it had drafts or some are to come; plans and drafts; puts
                     true counts, drafts and rows of further paths into what was scheduled; then vLLM updates its batch,
                     and the session is told which requests are gone and which are new; vLLM computes
    sample_tokens    vLLM verifies, and starts the copy of the tokens to the host, which is noted; after a step that is
                     not waited for the next one is planned at once

vLLM has scheduled a step, with room for drafts, before the last one's tokens are known: the wait comes when that is
done and the device is busy. All counts are known on the host then: vLLM need not correct any on the device, and drafts
travel with the input tokens. A step without drafts waits for nothing and copies nothing. Between the two phases lies
one step: drafts are asked for in it, and come with the next.

With tensor parallelism the first rank drafts, where clocks decide whether a step's tokens have arrived. The others ask
no clock: each is given its drafts before the step that verifies them, and waits for its own copy of the tokens where
drafts are verified, and before the first that are.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

from sam.engine.requests import Step
from sam.vllm import hooks, patches, ranks
from sam.vllm.exact_sampler import fill_last_placeholder
from sam.vllm.proposer import Adapter


class AsyncDrafting(Adapter):
    """Drafts for the requests of a step once its tokens have come to the host, by the copy that is on its way anyway.

    Attributes:
        accepted: tokens that came out for the drafts of `verifying`, by request.
        on_read: a StepRecorder's, called once a step's tokens are known.
    """

    is_async = True

    def __init__(self, vllm_config):
        ranks.check_async(vllm_config.parallel_config)
        super().__init__(vllm_config)
        self.accepted: dict[str, list[int]] = {}
        self.on_read: Callable[[], None] | None = None
        self._drafts: dict[str, list[int]] = {}  # of the next step
        self._unread: Step | None = None  # the last step, until it is waited for
        self._had_placeholders = False
        self._group: Any = None  # of the ranks that verify the first one's drafts

    def bind(self, runner) -> None:
        super().bind(runner)
        self._group = ranks.tensor_parallel_group(runner)
        install(runner, self)

    def after_step(self, output) -> None:
        """Note what a step brings, by vLLM's AsyncGPUModelRunnerOutput, whose copy to the host is under way."""
        batch = self._runner.input_batch
        rows = batch.num_reqs
        tokens = output.sampled_token_ids_cpu.numpy()
        step = Step(
            request_ids=batch.req_ids.copy(),
            emits=~self._runner.discard_request_mask.np[:rows],
            context=float(batch.num_tokens_no_spec[:rows].mean()),
            had_drafts=tokens.shape[1] > 1,  # what became of them has to be known before the next step
            tokens=tokens,
            counts=None,
            copied=output.async_copy_ready_event,
        )
        self._drafts = {}
        self.accepted = {}
        if not self.is_drafting_rank:
            self._unread = step
            self.verifying = {}  # what came out for them is known a step later: no recorder of this rank asks
        elif step.had_drafts or self.wants_drafts:
            self._unread = step
        else:
            self._drafts = self._draft(step, is_known=False)

    @property
    def is_awaiting(self) -> bool:
        """Whether the last step's tokens, and what they say about its drafts, are still to be read."""
        return self.is_drafting_rank and self._unread is not None

    def read_awaited(self, is_timed: bool = True) -> None:
        """Draft after the last step, if it is one that is waited for; may be called again. Not `is_timed` where the
        engine may have been idle since that step."""
        if not self.is_awaiting:
            return
        step = self._unread
        self._unread = None
        if not is_timed:
            self.last.state = None
            self.last.valid_for_steps = 0
        self.accepted = self._write(step)
        self._drafts = self._draft_known(step.counts)
        if self.on_read:
            self.on_read()

    def _write(self, step: Step) -> dict[str, list[int]]:
        """Wait for the last step's tokens, and put them where vLLM has them when it schedules synchronously; it left a
        placeholder for each row. The next step takes its input from there. Returns each request's."""
        step.read()
        rows = zip(step.request_ids, step.tokens.tolist(), step.counts.tolist(), strict=True)
        tokens_of = {name: tokens[:count] for name, tokens, count in rows}
        for name, tokens in tokens_of.items():
            if tokens:
                self._runner.requests[name].output_token_ids[-1:] = tokens
        batch = self._runner.input_batch
        starts = batch.num_tokens_no_spec[: len(tokens_of)] - (step.counts > 0)
        is_kept = np.arange(step.tokens.shape[1]) < step.counts[:, None]  # bool [rows, 1 + longest draft]
        row, offset = np.nonzero(is_kept)
        place = starts[row] + offset
        batch.token_ids_cpu[row, place] = step.tokens[row, offset]
        batch.is_token_ids[row, place] = True
        batch.num_tokens_no_spec[: len(tokens_of)] = starts + step.counts
        batch.prev_sampled_token_ids = None
        return tokens_of

    def before_step(self, scheduled) -> None:
        # No request goes on from the step before: the engine was idle in between.
        self.read_awaited(is_timed=bool(scheduled.scheduled_cached_reqs.req_ids))
        room = scheduled.scheduled_spec_decode_tokens
        drafts = [self._drafts.get(name, [])[: len(places)] for name, places in room.items()]
        if drafts and self._group:  # the requests, and their order, are the same on all ranks
            drafts = self._group.broadcast_object(drafts)
        self._catch_up(any(drafts))
        if self._had_placeholders:
            self._correct_counts(scheduled)
        self._had_placeholders = bool(room)
        for (name, places), draft in zip(room.items(), drafts, strict=True):
            missing = len(places) - len(draft)
            scheduled.num_scheduled_tokens[name] -= missing
            scheduled.total_num_scheduled_tokens -= missing
        verifying = {name: draft for name, draft in zip(room, drafts, strict=True) if draft}
        room.clear()
        room.update(verifying)
        self._verify(verifying, scheduled)

    def weights_updated(self) -> None:
        self.read_awaited(is_timed=False)
        super().weights_updated()

    def _catch_up(self, has_drafts: bool) -> None:
        """Where another rank drafts: wait for the last step's tokens, if drafts were among them or follow them now."""
        if self._unread is None:
            return
        step = self._unread
        self._unread = None
        if has_drafts or step.had_drafts:
            self.counters["waited_steps"] += 1
            self._write(step)

    def _correct_counts(self, scheduled) -> None:
        """The scheduler took every placeholder of the last step for an accepted token."""
        cached = scheduled.scheduled_cached_reqs
        computed = list(cached.num_computed_tokens)
        outputs = list(cached.num_output_tokens)
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._runner.input_batch.req_id_to_index or request_id in cached.resumed_req_ids:
                continue
            state = self._runner.requests[request_id]
            state.prev_num_draft_len = 0
            rejected = max(0, outputs[index] - len(state.output_token_ids))
            computed[index] -= rejected
            outputs[index] -= rejected
        scheduled.scheduled_cached_reqs = replace(cached, num_computed_tokens=computed, num_output_tokens=outputs)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Drafts of the step under way, for structured outputs."""
        return DraftTokenIds(list(self.verifying), [list(draft) for draft in self.verifying.values()])


class AsyncSamProposer(AsyncDrafting, NgramProposerGPU):
    """What vLLM takes for its NgramProposerGPU, whose kernel it neither compiles nor runs."""

    def __init__(self, vllm_config, _device, _runner=None):
        super().__init__(vllm_config)

    def update_token_ids_ngram(self, sampled_token_ids: torch.Tensor, *_unused):
        """Called by vLLM in place of its own bookkeeping on the device, with int32 [rows, 1 + longest draft]: a view of
        each row's first token, the next step's input if nobody waits; and two values that its own drafter needs."""
        return sampled_token_ids[:, 0], None, None

    def propose(self, *_unused) -> tuple[list, None]:
        """Called by vLLM before the tokens are copied, and given nothing: `after_step` drafts."""
        return [], None


def install(runner, proposer) -> None:
    """Connect a model runner with its AsyncDrafting."""
    if not runner.use_async_scheduling:
        raise ValueError(
            "vLLM schedules synchronously, with an asynchronous drafter: set speculation.async_scheduling=off"
        )
    # Counts are true on the host before a step begins: no correction on the device, no copy of them, no wait for one.
    put = functools.partial(patches.put, runner, name="draft_on_host")
    put("use_async_spec_decode", value=False)
    if runner.speculative_config.use_ngram_gpu():
        runner._num_valid_draft_tokens_cpu.fill_(runner.num_spec_tokens)  # before_step has trimmed already
        put("token_ids_gpu_tensor", value=runner.token_ids_gpu_tensor[:, :0].clone())
        skip_ngram_gpu_tensors()
    else:
        hooks.give_own_counts(runner)

    def keep_sampled_tokens(next_token_ids, _counts):
        """In place of a copy of the counts to the host."""
        runner.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)

    put("_copy_valid_sampled_token_count", value=keep_sampled_tokens)
    put("take_draft_token_ids", value=proposer.take_draft_token_ids)
    patches.before(runner, "_sample", "draft_on_host", lambda _logits: fill_last_placeholder(runner))
    patches.wrap(runner, "sample_tokens", "draft_on_host", functools.partial(_draft_after_sampling, proposer))


def _draft_after_sampling(proposer, sample_tokens, *arguments, **keywords):
    """Draft once vLLM's copy of the sampled tokens to the host is under way, and tell the scheduler."""
    output = sample_tokens(*arguments, **keywords)
    if hasattr(output, "get_output"):
        proposer.after_step(output)
        hooks.ask_for_room(output._model_runner_output, proposer)
    return output


def skip_ngram_gpu_tensors() -> None:
    """Keep no texts on the device for a model runner of ours, which has a tensor without columns there."""
    from vllm.v1.worker import gpu_model_runner

    def update(original, input_batch, token_ids_gpu_tensor, *arguments, **keywords):
        if token_ids_gpu_tensor.shape[1]:
            original(input_batch, token_ids_gpu_tensor, *arguments, **keywords)

    patches.wrap(gpu_model_runner, "update_ngram_gpu_tensors_incremental", "skip_ngram_gpu_tensors", update)
