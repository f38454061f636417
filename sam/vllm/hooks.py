"""The wires between vLLM's first model runner and drafters: what they change of it, and of its scheduler."""

import threading
from dataclasses import replace

from sam import verify
from sam.config import SpeculationConfig
from sam.vllm import patches

DISCARDED = "async_tokens_to_discard"  # attribute of a request, until vLLM 0.26: outputs under way that count no more
PLACEHOLDERS = "sam_placeholders"  # attribute of a step's output: drafts for which the scheduler is to leave room


def install(runner) -> None:
    """Change what a bound drafter asks for, however it is scheduled."""
    from vllm.platforms import current_platform

    if hasattr(runner, "effective_drafter_max_model_len"):
        most = runner.max_model_len + runner.num_spec_tokens
        patches.put(runner, "effective_drafter_max_model_len", "draft_near_max_model_len", most)
    patches.put(runner, "num_accepted_tokens_event", "skip_accepted_counts", None)
    notice_new_weights(runner)
    if current_platform.is_cuda():
        capture_drafts_of_any_length(runner)


def notice_new_weights(runner, each_step: str = "_update_states") -> None:
    """Tell the drafter of new weights, or of a LoRA adapter that is loaded again: once between two steps, in each of
    which the runner calls a method of its own."""
    told = threading.Event()
    adapters = set()
    name = "notice_new_weights"

    def tell(*_weights) -> None:
        if not told.is_set():
            told.set()
            runner.drafter.weights_updated()

    def note_adapter(request) -> None:
        if request.lora_int_id in adapters:
            tell()
        adapters.add(request.lora_int_id)

    patches.before(runner, each_step, name, lambda _: told.clear())
    patches.before(runner.get_model(), "load_weights", name, tell)
    patches.before(runner, "add_lora", name, note_adapter)


def capture_drafts_of_any_length(runner) -> None:
    """Capture each step as a whole graph, however many drafts each request has; those of one token a request where
    attention does not take any lengths. Only in vLLM's default mode, and without a draft model, whose graphs follow it.
    """
    from vllm.config import CUDAGraphMode

    compilation = runner.compilation_config
    name = "capture_drafts_of_any_length"
    has_model = hasattr(runner.drafter, "initialize_cudagraph_keys")
    if has_model or compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    for owner in (runner, runner.cudagraph_dispatcher):
        patches.put(owner, "uniform_decode_query_len", name, 1)

    def resolve_as_full(resolve, *arguments, **keywords):
        compilation.cudagraph_mode = CUDAGraphMode.FULL
        try:
            return resolve(*arguments, **keywords)
        except ValueError:  # of a backend that captures nothing whole
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            return resolve(*arguments, **keywords)

    patches.wrap(runner, "_check_and_update_cudagraph_mode", name, resolve_as_full)


def verify_by_rejection(module) -> None:
    """Put sam.verify's functions into a module that has vLLM's names, unless they are there: twice changes nothing."""
    if not module.rejection_sample.__module__.startswith("sam."):
        patches.put(module, "rejection_sample", "verify_by_rejection", verify.rejection_sample)
        patches.put(module, "expand_batch_to_tokens", "verify_by_rejection", verify.expand_batch_to_tokens)


def give_own_counts(runner) -> None:
    """Give the model runner dictionaries of its own of what is scheduled, which `before_step` trims."""

    def with_own_counts(execute_model, scheduler_output, *arguments, **keywords):
        own = ("num_scheduled_tokens", "scheduled_spec_decode_tokens")
        copies = {name: dict(getattr(scheduler_output, name)) for name in own}
        return execute_model(replace(scheduler_output, **copies), *arguments, **keywords)

    patches.wrap(runner, "execute_model", "own_counts", with_own_counts)


def ask_for_room(output, drafter) -> None:
    """Let the scheduler learn from a step's output, vLLM's ModelRunnerOutput, whether to leave room for drafts."""
    setattr(output, PLACEHOLDERS, drafter.num_speculative_tokens if drafter.wants_drafts else 0)


def schedule_wanted_drafts(scheduler_class) -> None:
    """Let the scheduler leave room for drafts only while some are to come."""

    def update_from_output(original, self, scheduler_output, model_runner_output):
        outputs = original(self, scheduler_output, model_runner_output)
        wanted = getattr(model_runner_output, PLACEHOLDERS, None)
        if wanted is None:  # of a step without requests; or the drafter has failed: room stays as it is
            return outputs
        self._sam_follows = True
        if wanted != len(self._spec_token_placeholders):
            self._spec_token_placeholders = [-1] * wanted
            for request in self.running:  # the next step's are set already
                if not request.is_prefill_chunk and not request.use_structured_output:
                    request.spec_token_ids = self._spec_token_placeholders
        return outputs

    def update_after_schedule(original, self, scheduler_output):
        if not hasattr(self, "_sam_follows"):  # before anything is drafted
            config = SpeculationConfig.from_vllm(self.vllm_config)
            self._sam_follows = config is not None and config.method == "sam"
            if self._sam_follows:
                self._spec_token_placeholders = []
        follows = self._sam_follows
        # From vLLM 0.24 on the next step's placeholders are as many as this says.
        if follows and hasattr(scheduler_output, "num_spec_tokens_to_schedule"):
            scheduler_output.num_spec_tokens_to_schedule = len(self._spec_token_placeholders)
        original(self, scheduler_output)
        if scheduler_output.has_structured_output_requests and follows:
            for request_id in scheduler_output.num_scheduled_tokens:
                if (request := self.requests[request_id]).use_structured_output:
                    request.spec_token_ids = []

    patches.wrap(scheduler_class, "update_from_output", "schedule_wanted_drafts", update_from_output)
    patches.wrap(scheduler_class, "_update_after_schedule", "schedule_wanted_drafts", update_after_schedule)


def discard_stale_drafts(scheduler_class) -> None:
    """Discard one output, with its drafts, of each request that is preempted by force: no more are under way."""

    def update_from_output(original, self, scheduler_output, model_runner_output):
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in list(drafts) if getattr(self, "_sam_follows", False) else ():
            if getattr(self.requests.get(request_id), DISCARDED, 0):
                del drafts[request_id]
        return original(self, scheduler_output, model_runner_output)

    def reset_prefix_cache(original, self, *arguments, **keywords):
        result = original(self, *arguments, **keywords)
        if getattr(self, "_sam_follows", False) and self.pp_size == 1:
            for request in self.requests.values():
                if getattr(request, DISCARDED, 0):
                    setattr(request, DISCARDED, 1)
        return result

    patches.wrap(scheduler_class, "update_from_output", "discard_stale_drafts", update_from_output)
    patches.wrap(scheduler_class, "reset_prefix_cache", "discard_stale_drafts", reset_prefix_cache)
