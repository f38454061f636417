"""Wires between vLLM 0.23's asynchronous scheduling and sam.vllm.async_proposer.

Each can go when vLLM lets a drafter on the host take part in asynchronous scheduling; they have no other purpose.
"""

import functools

from sam.config import SpeculationConfig
from sam.vllm import runner_hooks

COUNTERS = ("waited_steps", "late_steps")  # of an AsyncDrafting, beside a SamProposer's
PLACEHOLDERS = "sam_placeholders"  # attribute of a step's output: drafts for which the scheduler is to leave room


def open_ngram_gpu(proposer_class) -> None:
    """Make vLLM's NgramProposerGPU, or vllm-ascend's, what `proposer_class(it)` gives where speculation asks for `sam`.

    Root cause: vllm/v1/worker/gpu_model_runner.py takes no other class for the only drafter without a model that is
    scheduled asynchronously, and vllm/config/vllm.py turns asynchronous scheduling off for `custom_class`. Doing so
    twice changes nothing; engines without speculation keep vLLM's own drafter.
    """
    from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

    if getattr(NgramProposerGPU.__new__, "_sam", False):
        return

    def make(cls, *arguments, **keywords):
        vllm_config = arguments[0] if arguments else keywords["vllm_config"]
        config = SpeculationConfig.from_vllm(vllm_config)
        if config is not None and config.method == "sam":
            cls = proposer_class(cls)
        return object.__new__(cls)

    make._sam = True
    NgramProposerGPU.__new__ = make


def skip_ngram_tensors() -> None:
    """Keep no texts on the device for a drafter that reads them on the host.

    Root cause: GPUModelRunner._update_states copies every new request's text and all lengths to the device in each step
    for NgramProposerGPU's kernel. A model runner of ours has a tensor without columns there. Doing so twice changes
    nothing.
    """
    from vllm.v1.worker import gpu_model_runner

    original = gpu_model_runner.update_ngram_gpu_tensors_incremental
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def update(input_batch, token_ids_gpu_tensor, *arguments, **keywords):
        if token_ids_gpu_tensor.shape[1]:
            original(input_batch, token_ids_gpu_tensor, *arguments, **keywords)

    update._sam = True
    gpu_model_runner.update_ngram_gpu_tensors_incremental = update


def follow_switch(scheduler_class) -> None:
    """Let the scheduler leave room for drafts only while some are to come.

    Root cause: AsyncScheduler (vllm/v1/core/sched/async_scheduler.py) schedules placeholders for a whole draft of every
    request in every step. Symptom: where nothing is drafted, a request takes `num_speculative_tokens` more of the
    step's token budget and of the KV cache than it needs, and all counts have to be corrected. Requests with structured
    outputs get none: the bitmask that the scheduler makes has a line for every placeholder, also for those that the
    worker trims (so with vLLM's own ngram_gpu). Doing so twice changes nothing.
    """
    original, after_schedule = scheduler_class.update_from_output, scheduler_class._update_after_schedule
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = original(self, scheduler_output, model_runner_output)
        wanted = getattr(model_runner_output, PLACEHOLDERS, None)
        self._sam_follows = wanted is not None
        if self._sam_follows and wanted != len(self._spec_token_placeholders):
            self._spec_token_placeholders = [-1] * wanted
            for request in self.running:  # the next step's are set already
                if not request.is_prefill_chunk and not request.use_structured_output:
                    request.spec_token_ids = self._spec_token_placeholders
        return outputs

    @functools.wraps(after_schedule)
    def _update_after_schedule(self, scheduler_output):
        after_schedule(self, scheduler_output)
        if scheduler_output.has_structured_output_requests and getattr(self, "_sam_follows", False):
            for request_id in scheduler_output.num_scheduled_tokens:
                if (request := self.requests[request_id]).use_structured_output:
                    request.spec_token_ids = []

    update_from_output._sam = True
    scheduler_class.update_from_output = update_from_output
    scheduler_class._update_after_schedule = _update_after_schedule


def discard_stale_drafts(scheduler_class) -> None:
    """Discard one output, with its drafts, of each request that is preempted by force.

    Root cause: Scheduler.reset_prefix_cache(reset_running_requests=True) lets AsyncScheduler discard as many outputs of
    a request as it has placeholders, but with speculation one output has several; and update_from_output still takes
    that output's rejected drafts off the counts of the resumed request. Symptom: `assert num_output_placeholders >= 0`,
    or tokens of the following steps are lost. Without pipeline parallelism one output at most is under way. Doing so
    twice changes nothing. Can go when vLLM counts outputs there.
    """
    original, take_output = scheduler_class.reset_prefix_cache, scheduler_class.update_from_output
    if getattr(original, "_sam", False):
        return

    @functools.wraps(take_output)
    def update_from_output(self, scheduler_output, model_runner_output):
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in list(drafts) if getattr(self, "_sam_follows", False) else ():
            if (request := self.requests.get(request_id)) is not None and request.async_tokens_to_discard:
                del drafts[request_id]
        return take_output(self, scheduler_output, model_runner_output)

    @functools.wraps(original)
    def reset_prefix_cache(self, *arguments, **keywords):
        result = original(self, *arguments, **keywords)
        if getattr(self, "_sam_follows", False) and self.pp_size == 1:
            for request in self.requests.values():
                request.async_tokens_to_discard = min(request.async_tokens_to_discard, 1)
        return result

    reset_prefix_cache._sam = update_from_output._sam = True
    scheduler_class.reset_prefix_cache = reset_prefix_cache
    scheduler_class.update_from_output = update_from_output


def install(runner, proposer) -> None:
    """Connect a model runner with its AsyncDrafting.

    Raises:
        ValueError: the engine schedules synchronously.
    """
    if not runner.use_async_scheduling:
        raise ValueError(
            "a drafter for asynchronous scheduling, but vLLM schedules synchronously: set "
            "speculation.async_scheduling=off"
        )
    # Counts are true on the host before a step begins: no correction on the device, no copy of them, no wait for one.
    runner.use_async_spec_decode = False
    if runner.speculative_config.use_ngram_gpu():
        runner._num_valid_draft_tokens_cpu.fill_(runner.num_spec_tokens)  # before_step has trimmed already
        runner.token_ids_gpu_tensor = runner.token_ids_gpu_tensor[:, :0].clone()
        skip_ngram_tensors()
    else:
        runner.execute_model = runner_hooks.with_own_counts(runner.execute_model)
    runner._copy_valid_sampled_token_count = functools.partial(_keep_sampled_tokens, runner)
    runner.take_draft_token_ids = proposer.take_draft_token_ids
    runner._update_states = runner_hooks.before(runner._update_states, proposer.before_step)
    runner._sample = runner_hooks.before(runner._sample, lambda *_: runner_hooks.fill_last_placeholder(runner))
    runner.sample_tokens = _after_sampling(runner.sample_tokens, proposer)


def _keep_sampled_tokens(runner, next_token_ids, _counts) -> None:
    """In place of a copy of the counts to the host: GPUModelRunner._copy_valid_sampled_token_count."""
    runner.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)


def _after_sampling(sample_tokens, proposer):
    """Draft once vLLM's copy of the sampled tokens to the host is under way, and tell the scheduler."""

    @functools.wraps(sample_tokens)
    def wrapped(*arguments, **keywords):
        output = sample_tokens(*arguments, **keywords)
        if hasattr(output, "get_output"):
            proposer.after_step(output)
            wanted = proposer.num_speculative_tokens if proposer.wants_drafts else 0
            setattr(output._model_runner_output, PLACEHOLDERS, wanted)
        return output

    return wrapped
