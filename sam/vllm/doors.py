"""The doors of vLLM: what this project replaces, calls and reads there, by what it is and not by a version's number.

A line of DOORS names a file below vLLM's folder, and in it a function, a class, or an attribute of a class; behind a
method or function stand the arguments that it is called with, in their order. A door is looked for in vLLM's sources:
nothing is imported, since vLLM's CPU worker replaces parts of its modules before they may be.
"""

import ast
import functools
import importlib.util
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

# Versions that have passed `bash scripts/test.sh --versions`: docs/compatibility.md.
TESTED = tuple(f"0.{minor}" for minor in range(23, 33))
RUNNER = "v1/worker/gpu_model_runner.py GPUModelRunner"
SECOND = "v1/worker/gpu/model_runner.py"
BATCH = "v1/worker/gpu_input_batch.py InputBatch"
SCHEDULER = "v1/core/sched/scheduler.py Scheduler"
SCHEDULED = "v1/core/sched/output.py"
DOORS = {
    # Through which an engine with a `speculation` comes, whichever its model runner is.
    "plugin": (
        "v1/worker/worker_base.py WorkerWrapperBase.init_device()",
        "config/scheduler.py SchedulerConfig.get_scheduler_cls()",
        "config/vllm.py VllmConfig.additional_config",
    ),
    "first": (
        f"{RUNNER}.load_model()",
        f"{RUNNER}.get_model()",
        f"{RUNNER}.execute_model(scheduler_output)",
        f"{RUNNER}.sample_tokens()",
        f"{RUNNER}._update_states(scheduler_output)",
        f"{RUNNER}._sample(logits, spec_decode_metadata)",
        f"{RUNNER}._bookkeeping_sync()",
        f"{RUNNER}._model_forward()",
        f"{RUNNER}._dummy_run(num_tokens)",
        f"{RUNNER}._sync_device()",
        f"{RUNNER}.capture_model()",
        f"{RUNNER}.initialize_kv_cache(kv_cache_config)",
        f"{RUNNER}._check_and_update_cudagraph_mode()",
        f"{RUNNER}._determine_batch_execution_and_padding(num_tokens)",
        f"{RUNNER}.take_draft_token_ids()",
        f"{RUNNER}.propose_draft_token_ids(scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
        "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata)",
        f"{RUNNER}._get_spec_decode_draft_probs(spec_decode_metadata)",
        f"{RUNNER}._prepare_input_ids(scheduler_output, num_reqs, total_num_scheduled_tokens, cu_num_tokens)",
        f"{RUNNER}._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)",
        f"{RUNNER}._num_valid_draft_tokens_cpu",
        f"{RUNNER}.discard_request_mask",
        f"{RUNNER}.effective_drafter_max_model_len",
        f"{RUNNER}.input_batch",
        f"{RUNNER}.num_accepted_tokens_event",
        f"{RUNNER}.num_spec_tokens",
        f"{RUNNER}.rejection_sampler",
        f"{RUNNER}.requests",
        f"{RUNNER}.sampler",
        f"{RUNNER}.token_ids_gpu_tensor",
        f"{RUNNER}.uniform_decode_query_len",
        f"{RUNNER}.use_async_scheduling",
        f"{RUNNER}.use_async_spec_decode",
        "v1/worker/gpu_model_runner.py AsyncGPUModelRunnerOutput.sampled_token_ids_cpu",
        "v1/worker/gpu_model_runner.py AsyncGPUModelRunnerOutput.async_copy_ready_event",
        "v1/worker/gpu_model_runner.py AsyncGPUModelRunnerOutput._model_runner_output",
        "v1/worker/gpu_model_runner.py update_ngram_gpu_tensors_incremental",
        f"{BATCH}.generators",
        f"{BATCH}.is_token_ids",
        f"{BATCH}.num_tokens_no_spec",
        f"{BATCH}.prev_sampled_token_ids",
        f"{BATCH}.req_id_to_index",
        f"{BATCH}.req_ids",
        f"{BATCH}.sampling_metadata",
        f"{BATCH}.token_ids_cpu",
        f"{BATCH}.update_async_output_token_ids()",
        "v1/worker/gpu_input_batch.py CachedRequestState.num_prompt_tokens",
        "v1/worker/gpu_input_batch.py CachedRequestState.num_tokens",
        "v1/worker/gpu_input_batch.py CachedRequestState.output_token_ids",
        "v1/worker/gpu_input_batch.py CachedRequestState.prev_num_draft_len",
        "v1/worker/gpu_input_batch.py CachedRequestState.prompt_token_ids",
        "v1/sample/ops/topk_topp_sampler.py apply_top_k_top_p(logits, k, p)",
        "v1/sample/sampler.py Sampler.apply_logits_processors(logits, sampling_metadata)",
        "v1/sample/sampler.py Sampler.compute_logprobs(logits)",
        "v1/sample/sampler.py Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)",
        "v1/sample/rejection_sampler.py RejectionSampler.apply_logits_processors(logits, sampling_metadata, metadata)",
        "v1/sample/rejection_sampler.py rejection_sample(draft_token_ids, num_draft_tokens)",
        "v1/sample/rejection_sampler.py expand_batch_to_tokens(x, cu_num_tokens, num_tokens)",
        "v1/spec_decode/custom_class_proposer.py create_custom_proposer(vllm_config)",
        "v1/spec_decode/ngram_proposer_gpu.py NgramProposerGPU(vllm_config, device)",
        f"{SCHEDULER}.update_from_output(scheduler_output, model_runner_output)",
        f"{SCHEDULER}.reset_prefix_cache(reset_running_requests)",
        f"{SCHEDULER}.requests",
        f"{SCHEDULER}.running",
        "v1/core/sched/async_scheduler.py AsyncScheduler._update_after_schedule(scheduler_output)",
        "v1/core/sched/async_scheduler.py AsyncScheduler._spec_token_placeholders",
        f"{SCHEDULED} SchedulerOutput.finished_req_ids",
        f"{SCHEDULED} SchedulerOutput.num_scheduled_tokens",
        f"{SCHEDULED} SchedulerOutput.scheduled_new_reqs",
        f"{SCHEDULED} SchedulerOutput.scheduled_cached_reqs",
        f"{SCHEDULED} SchedulerOutput.scheduled_spec_decode_tokens",
        f"{SCHEDULED} SchedulerOutput.total_num_scheduled_tokens",
        f"{SCHEDULED} CachedRequestData.num_computed_tokens",
        f"{SCHEDULED} CachedRequestData.num_output_tokens",
        f"{SCHEDULED} CachedRequestData.resumed_req_ids",
    ),
    # Repairs of vLLM's CPU backend.
    "cpu": (
        "_custom_ops.py create_onednn_mm(weight)",
        "_custom_ops.py onednn_mm(dnnl_handler, x, bias)",
        "model_executor/layers/utils.py dispatch_cpu_unquantized_gemm(layer, remove_weight)",
        f"{RUNNER}.reload_weights()",
    ),
    "second": (
        "config/vllm.py VllmConfig._get_v2_model_runner_unsupported_features()",
        "v1/engine/input_processor.py InputProcessor.speculative_config",
        f"{SECOND} GPUModelRunner.execute_model(scheduler_output)",
        f"{SECOND} GPUModelRunner.finish_requests(scheduler_output)",
        f"{SECOND} GPUModelRunner.load_model()",
        f"{SECOND} GPUModelRunner.take_draft_token_ids()",
        f"{SECOND} GPUModelRunner.initialize_kv_cache(kv_cache_config)",
        f"{SECOND} GPUModelRunner.decode_query_len",
        f"{SECOND} GPUModelRunner.num_speculative_steps",
        f"{SECOND} GPUModelRunner.sample_tokens()",
        f"{SECOND} GPUModelRunner.execute_model_state",
        f"{SECOND} GPUModelRunner.speculator",
        f"{SECOND} GPUModelRunner.rejection_sampler",
        f"{SECOND} GPUModelRunner.req_states",
        f"{SECOND} GPUModelRunner.sampler",
        "v1/worker/gpu/async_utils.py AsyncOutput.copy_event",
        "v1/worker/gpu/async_utils.py AsyncOutput.model_runner_output",
        "v1/worker/gpu/async_utils.py AsyncOutput.num_sampled_tokens_np",
        "v1/worker/gpu/async_utils.py AsyncOutput.sampled_token_ids",
        "v1/worker/gpu/states.py RequestState.all_token_ids",
        "v1/worker/gpu/states.py RequestState.draft_tokens",
        "v1/worker/gpu/states.py RequestState.req_id_to_index",
        "v1/worker/gpu/states.py RequestState.total_len",
        "v1/worker/gpu/spec_decode/__init__.py init_speculator(vllm_config, device)",
        "v1/worker/gpu/buffer_utils.py UvaBuffer(size, dtype)",
        "utils/platform_utils.py is_uva_available",
        "utils/torch_utils.py async_tensor_h2d(data, device)",
        "utils/torch_utils.py get_accelerator_view_from_cpu_tensor(cpu_tensor)",
        "v1/worker/gpu/input_batch.py InputBatch.idx_mapping",
        "v1/worker/gpu/input_batch.py InputBatch.num_computed_tokens_np",
        "v1/worker/gpu/input_batch.py InputBatch.num_draft_tokens",
        "v1/worker/gpu/input_batch.py InputBatch.num_draft_tokens_per_req",
        "v1/worker/gpu/input_batch.py InputBatch.prefill_len_np",
        "v1/worker/gpu/input_batch.py get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, "
        "prefill_len)",
        f"{SCHEDULED} NewRequestData.prefill_token_ids",
    ),
}


@functools.cache  # vLLM loads its plugins again and again
def missing(group: str, folder: Path | None = None) -> list[str]:
    """The doors of a group that vLLM lacks, as DOORS has them; `folder` is another vLLM's than the installed one."""
    folder = folder or _folder()
    sources: dict[str, _Source] = {}  # for this call: the tree of a large file takes more memory than its text
    gone = []
    for door in DOORS[group]:
        file, _, name = door.partition(" ")
        if file not in sources:
            sources[file] = _Source(folder / file)
        if not sources[file].has(name):
            gone.append(door)
    return gone


def problem(group: str) -> str | None:
    """A line with the first door of a group that vLLM lacks; None: it has them all."""
    if not (gone := missing(group)):
        return None
    other = ", or set VLLM_USE_V2_MODEL_RUNNER=0" if group == "second" else ""
    return f"this vLLM has no {gone[0]}, which speculation needs: install vLLM {TESTED[0]} to {TESTED[-1]}{other}"


def check(*groups: str) -> None:
    """Refuse a vLLM that lacks a door of these groups; name one that nobody has tested, once.

    Raises:
        ValueError: one line with the door.
    """
    from vllm import __version__

    for line in map(problem, groups):
        if line:
            raise ValueError(line)
    _say_untested(__version__)


@functools.cache
def _say_untested(version: str) -> None:
    if ".".join(version.split(".")[:2]) not in TESTED:
        logger.warning("vLLM %s: not tested with this project; all that it needs of vLLM is there", version)


def describe() -> dict[str, str]:
    """Of each group of doors what vLLM has of it, in words."""
    described = {}
    for group, doors in DOORS.items():
        gone = missing(group)
        there = f"{len(doors) - len(gone)} of {len(doors)}"
        described[group] = f"{there}, no {gone[0]}" if gone else there
    return described


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _folder() -> Path:
    """Where the installed vLLM lies, without importing it."""
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


class _Source:
    """What a file of vLLM's binds by name, and its classes; nothing if there is no such file."""

    def __init__(self, path: Path):
        self._names = _names(ast.parse(path.read_text()).body) if path.is_file() else {}
        self._classes: dict[str, dict[str, ast.AST]] = {}

    def has(self, door: str) -> bool:
        """Whether there is a `name`, a `name(arguments)`, a `Class.name` or a `Class.name(arguments)`."""
        name, _, arguments = door.rstrip(")").partition("(")
        owner, _, attribute = name.partition(".")
        bound = self._names.get(owner)
        if attribute:
            bound = self._of_class(owner, bound).get(attribute)
        wanted = [argument for argument in arguments.split(", ") if argument]
        return bound is not None and (not wanted or _arguments(bound)[: len(wanted)] == wanted)

    def _of_class(self, name: str, node: ast.AST | None) -> dict[str, ast.AST]:
        if name not in self._classes:
            self._classes[name] = _attributes(node) if isinstance(node, ast.ClassDef) else {}
        return self._classes[name]


def _names(statements: list[ast.stmt]) -> dict[str, ast.AST]:
    """What statements bind, those within `if` and `try` too."""
    names: dict[str, ast.AST] = {}
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = statement
            case ast.ImportFrom(names=imported) | ast.Import(names=imported):
                names |= {binding.asname or binding.name: statement for binding in imported}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = statement
            case ast.Assign(targets=targets):
                names |= {binding.id: statement for binding in targets if isinstance(binding, ast.Name)}
            case ast.If() | ast.Try():
                names |= _names(statement.body) | _names(statement.orelse)
    return names


def _attributes(node: ast.ClassDef) -> dict[str, ast.AST]:
    """What a class binds, and what its methods set of `self`."""
    attributes: dict[str, ast.AST] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            attributes[part.attr] = part
    return attributes | _names(node.body)


def _arguments(node: ast.AST) -> list[str]:
    """Names of the arguments by place, without `self`, of a function or of a class's constructor."""
    if isinstance(node, ast.ClassDef):
        node = _attributes(node).get("__init__")
    if not isinstance(node, ast.FunctionDef):
        return []
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names
