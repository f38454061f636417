"""Wires between vLLM 0.23's asynchronous scheduling and sam.vllm.async_proposer."""

import functools

from sam.config import SpeculationConfig
from sam.vllm import patches, runner_hooks

COUNTERS = ("waited_steps", "late_steps")  # of an AsyncDrafting, beside a SamProposer's
PLACEHOLDERS = "sam_placeholders"  # attribute of a step's output: drafts for which the scheduler is to leave room


def substitute_ngram_gpu_proposer(proposer_class) -> None:
    """Make vLLM's NgramProposerGPU, or vllm-ascend's, what `proposer_class(it)` gives where speculation asks for `sam`;
    engines without speculation keep vLLM's own drafter."""
    from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

    def make(_original, cls, *arguments, **keywords):
        vllm_config = arguments[0] if arguments else keywords["vllm_config"]
        config = SpeculationConfig.from_vllm(vllm_config)
        return object.__new__(proposer_class(cls) if config is not None and config.method == "sam" else cls)

    patches.wrap(NgramProposerGPU, "__new__", "make_sam_async", make)


def skip_ngram_gpu_tensors() -> None:
    """Keep no texts on the device for a model runner of ours, which has a tensor without columns there."""
    from vllm.v1.worker import gpu_model_runner

    def update(original, input_batch, token_ids_gpu_tensor, *arguments, **keywords):
        if token_ids_gpu_tensor.shape[1]:
            original(input_batch, token_ids_gpu_tensor, *arguments, **keywords)

    patches.wrap(gpu_model_runner, "update_ngram_gpu_tensors_incremental", "skip_ngram_gpu_tensors", update)


def schedule_wanted_drafts(scheduler_class) -> None:
    """Let the scheduler leave room for drafts only while some are to come."""

    def update_from_output(original, self, scheduler_output, model_runner_output):
        outputs = original(self, scheduler_output, model_runner_output)
        wanted = getattr(model_runner_output, PLACEHOLDERS, None)
        self._sam_follows = wanted is not None
        if self._sam_follows and wanted != len(self._spec_token_placeholders):
            self._spec_token_placeholders = [-1] * wanted
            for request in self.running:  # the next step's are set already
                if not request.is_prefill_chunk and not request.use_structured_output:
                    request.spec_token_ids = self._spec_token_placeholders
        return outputs

    def update_after_schedule(original, self, scheduler_output):
        original(self, scheduler_output)
        if scheduler_output.has_structured_output_requests and getattr(self, "_sam_follows", False):
            for request_id in scheduler_output.num_scheduled_tokens:
                if (request := self.requests[request_id]).use_structured_output:
                    request.spec_token_ids = []

    patches.wrap(scheduler_class, "update_from_output", "schedule_wanted_drafts", update_from_output)
    patches.wrap(scheduler_class, "_update_after_schedule", "schedule_wanted_drafts", update_after_schedule)


def discard_stale_drafts(scheduler_class) -> None:
    """Discard one output, with its drafts, of each request that is preempted by force.

    Without pipeline parallelism one output at most is under way.
    """

    def update_from_output(original, self, scheduler_output, model_runner_output):
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in list(drafts) if getattr(self, "_sam_follows", False) else ():
            if (request := self.requests.get(request_id)) is not None and request.async_tokens_to_discard:
                del drafts[request_id]
        return original(self, scheduler_output, model_runner_output)

    def reset_prefix_cache(original, self, *arguments, **keywords):
        result = original(self, *arguments, **keywords)
        if getattr(self, "_sam_follows", False) and self.pp_size == 1:
            for request in self.requests.values():
                request.async_tokens_to_discard = min(request.async_tokens_to_discard, 1)
        return result

    patches.wrap(scheduler_class, "update_from_output", "discard_stale_drafts", update_from_output)
    patches.wrap(scheduler_class, "reset_prefix_cache", "discard_stale_drafts", reset_prefix_cache)


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
    put = functools.partial(patches.put, runner, name="draft_on_host")
    put("use_async_spec_decode", value=False)
    if runner.speculative_config.use_ngram_gpu():
        runner._num_valid_draft_tokens_cpu.fill_(runner.num_spec_tokens)  # before_step has trimmed already
        put("token_ids_gpu_tensor", value=runner.token_ids_gpu_tensor[:, :0].clone())
        skip_ngram_gpu_tensors()
    else:
        runner_hooks.give_own_counts(runner)
    put("_copy_valid_sampled_token_count", value=functools.partial(_keep_sampled_tokens, runner))
    put("take_draft_token_ids", value=proposer.take_draft_token_ids)
    fill = lambda _logits: runner_hooks.fill_last_placeholder(runner)  # noqa: E731
    patches.before(runner, "_update_states", "draft_on_host", proposer.before_step)
    patches.before(runner, "_sample", "draft_on_host", fill)
    patches.wrap(runner, "sample_tokens", "draft_on_host", functools.partial(_draft_after_sampling, proposer))


def _keep_sampled_tokens(runner, next_token_ids, _counts) -> None:
    """In place of a copy of the counts to the host: GPUModelRunner._copy_valid_sampled_token_count."""
    runner.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)


def _draft_after_sampling(proposer, sample_tokens, *arguments, **keywords):
    """Draft once vLLM's copy of the sampled tokens to the host is under way, and tell the scheduler."""
    output = sample_tokens(*arguments, **keywords)
    if hasattr(output, "get_output"):
        proposer.after_step(output)
        wanted = proposer.num_speculative_tokens if proposer.wants_drafts else 0
        setattr(output._model_runner_output, PLACEHOLDERS, wanted)
    return output
