"""Everything of vLLM (0.23 and later, unless said) and vllm-ascend that this project replaces, why, and when it can go.

`PATCHES` is the whole list: `wrap` and `put` (sam/patching.py) replace nothing that does not stand in it, and nothing
else replaces anything (tests/test_layers.py). An engine for which no `speculation` is configured keeps vLLM's own but
for the first three and `take_all_sampling`, which look for that and step aside.
"""

from sam.patching import Patch, before, make_instead, put, register, wrap

__all__ = ["PATCHES", "before", "is_registered", "make_instead", "put", "wrap"]

# fmt: off
PATCHES = register({
    # Doors through which an engine with a `speculation` comes.
    "find_speculation": Patch("vllm.v1.worker.worker_base.WorkerWrapperBase", "init_device",
        "a plugin is called before there is a config.", "vLLM has a hook for a model runner that has been made."),
    "find_scheduler": Patch("vllm.config.SchedulerConfig", "get_scheduler_cls", "as above.", "as above."),
    "choose_as_stock": Patch("vllm.config.VllmConfig", "__post_init__ _get_v2_model_runner_unsupported_features",
        "for a drafter of the user's vLLM takes its first model runner and schedules synchronously.",
        "either runner takes a drafter of the user's, however it is scheduled."),
    "install": Patch("runner", "load_model", "drafter and samplers need a model runner with its model.", "as above."),
    "make_sam_async": Patch("vllm.v1.spec_decode.ngram_proposer_gpu.NgramProposerGPU", "__new__",
        "gpu_model_runner.py takes no other class for the only drafter without a model that is scheduled "
        "asynchronously, and vllm/config/vllm.py turns asynchronous scheduling off for `custom_class`.",
        "asynchronous scheduling takes a drafter of the user's."),
    "make_trained": Patch("vllm.v1.spec_decode: draft_model.DraftModelProposer, eagle.EagleProposer", "__new__",
        "vLLM takes no other class for a drafter with a model; its own have to run in every step.",
        "vLLM lets a drafter of the user's have a KV cache."),
    # A request that stops.
    "count_stopped_text": Patch("vllm.v1.core.sched.scheduler.Scheduler", "_update_request_with_output",
        "tokens of accepted drafts behind a stop are cut off the text and stay counted as computed, by which a KV "
        "connector sends blocks.", "vLLM takes them off where it cuts the text."),
    "refuse_sessions": Patch("vllm.v1.engine.input_processor.InputProcessor", "process_inputs",
        "a session of streaming input goes on by that count: other tokens follow, over other KV. Asynchronously it "
        "also takes the output of the step under way for its text (until 0.31), and it loses its text where it stops "
        "when it has been preempted.",
        "vLLM counts a session's text alone."),
    # Verification.
    "sample_exactly": Patch("runner", "_sample",
        "vLLM's samplers draw with other random numbers with drafts than without.", "never."),
    "verify_by_rejection": Patch("module of vLLM's rejection sampler", "rejection_sample expand_batch_to_tokens",
        "on a CPU (0.23, 0.24) vllm/utils/cpu_triton_utils.py does not know the kernels' `USE_FP64_GUMBEL` (TypeError "
        "at warm-up), and its `expand_kernel` writes into an int64 copy, so that each token's temperature, top-k and "
        "top-p stay uninitialised.",
        "both are mended; the recipe's own rejection sampler is what verification=rejection asks for."),
    # Drafts in a step.
    "draft_near_max_model_len": Patch("runner", "effective_drafter_max_model_len",
        "`_input_fits_in_drafter` asks whether the longest request leaves room for a whole draft; if not, nobody is "
        "drafted for, and zeros are verified.", "vLLM asks that of draft models only."),
    "skip_empty_drafts": Patch("runner", "take_draft_token_ids",
        "after a step without drafts, too, a list for every request goes to the scheduler: a call through the executor "
        "and a loop over all requests.", "vLLM sends nothing where nothing was drafted."),
    "skip_accepted_counts": Patch("runner", "num_accepted_tokens_event",
        "with speculative tokens every step waits for an event and copies counts to the device, which models with "
        "recurrent state alone read.", "vLLM makes that event for hybrid models only."),
    "notice_new_weights": Patch("runner and its model", "load_weights add_lora _update_states finish_requests",
        "frameworks hand new weights to the model or its adapter in pieces, each in its own way; text of older weights "
        "leaves the history first.", "vLLM tells its drafter of new weights."),
    "keep_other_ranks_tokens": Patch("runner", "_determine_batch_execution_and_padding",
        "data-parallel ranks pad a step to the largest batch; the counts that they exchange for it are dropped.",
        "vLLM keeps them."),
    "measure_at_warm_up": Patch("runner", "capture_model initialize_kv_cache",
        "nothing is called between the end of warm-up and the first request.", "vLLM calls its drafter there."),
    "record_steps": Patch("runner; of the second one also its drafter's session and AsyncOutput",
        "execute_model _model_forward _sample propose_draft_token_ids sample_tokens "
        "add_requests sample draft get_output",
        "vLLM's metrics are sums over an engine, without what single steps took.", "vLLM reports steps."),
    # Asynchronous scheduling.
    "schedule_wanted_drafts": Patch("AsyncScheduler", "update_from_output _update_after_schedule",
        "every step has placeholders for a whole draft of every request: where nothing is drafted, they take token "
        "budget and KV cache. Requests with structured outputs get none, since the scheduler's bitmask has a line for "
        "every placeholder, also for those that the worker trims.",
        "the drafter is asked; from 0.24 on a table of the scheduler's says how many (num_spec_tokens_to_schedule)."),
    "discard_stale_drafts": Patch("AsyncScheduler", "update_from_output reset_prefix_cache",
        "until 0.26 reset_prefix_cache(reset_running_requests=True) discards as many outputs of a request as it has "
        "placeholders, but with speculation one output has several; and that output's rejected drafts still come off "
        "the counts of the resumed request: `assert num_output_placeholders >= 0`, or lost tokens.",
        "vLLM counts outputs there."),
    "skip_ngram_gpu_tensors": Patch("vllm.v1.worker.gpu_model_runner", "update_ngram_gpu_tensors_incremental",
        "texts and lengths are copied to the device for NgramProposerGPU's kernel; ours reads them on the host.",
        "asynchronous scheduling takes a drafter of the user's."),
    "draft_on_host": Patch("runner",
        "use_async_spec_decode token_ids_gpu_tensor _copy_valid_sampled_token_count take_draft_token_ids "
        "_update_states _sample sample_tokens propose_draft_token_ids _prepare_input_ids execute_model "
        "speculator num_speculative_steps",
        "vLLM's asynchronous drafters run on the device, and the host corrects its counts a step late. Ours put true "
        "counts and drafts into the next step before it begins; a trained drafter's are filled in on the device. No "
        "runner tells its drafters which requests are new, nor their prompts, nor which have finished.",
        "asynchronous scheduling takes a drafter of the user's."),
    "own_counts": Patch("runner", "execute_model",
        "only for ngram_gpu has the model runner its own dictionaries of what is scheduled: in an engine of one "
        "process the scheduler's would be trimmed.", "vLLM copies them for every drafter."),
    # Several paths of a request, speculation.paths above 1.
    "add_path_rows": Patch("runner", "initialize_kv_cache",
        "vLLM verifies one path of a request; rows of others write into blocks beyond the scheduler's.",
        "it verifies several."),
    # Trained drafters.
    "draft_with_model": Patch("runner", "_get_spec_decode_draft_probs propose_draft_token_ids",
        "vLLM's draft models draft in every step and for all requests; the switch and hybrid drafts do not.",
        "vLLM lets a drafter of the user's have a KV cache."),
    # Graphs.
    "capture_drafts_of_any_length": Patch("runner",
        "uniform_decode_query_len _check_and_update_cudagraph_mode initialize_kv_cache decode_query_len",
        "with k speculative tokens whole graphs are captured for steps of 1 + k tokens a request; all others, those "
        "without drafts too, run layer by layer (Qwen3-8B on an H200: 8 to 14 ms in place of 5). Where attention takes "
        "any lengths in a graph (FlashAttention 3), a graph of n tokens serves all steps of n tokens.",
        "vLLM captures decode graphs for several lengths."),
    # vLLM's second model runner, where something drafts (sam/vllm/v2); `runner` is its GPUModelRunner.
    "make_speculator": Patch("vllm.v1.worker.gpu.model_runner", "init_speculator",
        "the runner makes vLLM's own drafters only, whose prompt lookup looks at a request's own text.",
        "vLLM takes a speculator of the user's (issues 51212 and 53895)."),
    "take_all_sampling": Patch("vllm.v1.engine.input_processor.InputProcessor", "__init__ speculative_config",
        "vLLM refuses requests with min_p or logit_bias where drafts are verified, since its rejection sampler leaves "
        "both out; the runner's own sampler, which draws in exact verification, does not.",
        "vLLM asks its rejection sampler."),
    "verify_exactly": Patch("runner", "rejection_sampler",
        "vLLM's rejection sampler draws with other random numbers with drafts than without.", "never."),
    # vLLM's CPU backend.
    "multiply_invariantly": Patch("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm",
        "see sam/vllm/cpu_fixes.py: a row's bits depend on how many rows a product has.",
        "vLLM has a batch-invariant mode for CPUs."),
    "pack_after_loads": Patch("runner, runner.model", "load_weights reload_weights",
        "with batch_invariant=off vLLM's packed weights have to follow the model's.", "vLLM packs again."),
    "keep_unread_generators": Patch("runner", "_bookkeeping_sync",
        "it winds the generator of a request whose prompt is not complete back by `set_offset`, which CPU generators "
        "do not have: NotImplementedError ends the engine. Here it stays where it is: the noise is fresh either way.",
        "vLLM checks the generator's device there."),
    # sam bench --text: an engine that is measured emits a recording.
    "force_text": Patch("runner; of the first one also its sampler", "_sample draw add_requests sample",
        "random weights write no text that repeats itself as a real model's does: requests emit a recorded response "
        "in place of what was drawn.", "never: it is what is measured."),
})
# fmt: on


def is_registered() -> bool:
    """Whether this process has the plugin."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return hasattr(WorkerWrapperBase.init_device, "_sam")
