"""Step costs for the goodput policy of a vLLM engine: whose they are, from a file, or coarse ones of its own."""

import logging
import time
from pathlib import Path

import numpy as np

from sam.config import SpeculationConfig
from sam.switch.step_cost import StepCost

logger = logging.getLogger(__name__)

WARM_UP_REPEATS = 3


def fingerprint(vllm_config) -> dict[str, str | int]:
    """Model, device, dtype and modes of an engine: a step-cost table measured with others does not apply to it."""
    from vllm.platforms import current_platform

    model, hf = vllm_config.model_config, vllm_config.model_config.hf_config
    device = _processor() if current_platform.device_type == "cpu" else current_platform.get_device_name()
    sizes = [getattr(hf, name, 0) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    return {
        "model": f"{hf.model_type} layers {sizes[0]} hidden {sizes[1]} vocabulary {sizes[2]}",
        "device": device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "eager": int(model.enforce_eager),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0]}, {len(names)} threads" if names else "cpu"


def policy_and_table(config: SpeculationConfig, vllm_config) -> tuple[str, StepCost | None]:
    """The policy to use and its table. With a table that cannot be used: the threshold policy, and one warning."""
    if config.policy != "goodput" or not config.step_cost:
        return config.policy, None
    try:
        table = StepCost.load(Path(config.step_cost))
        table.check_fingerprint(fingerprint(vllm_config))
    except ValueError as error:
        logger.warning("speculation.policy=threshold instead of goodput: %s", error)
        return "threshold", None
    return "goodput", table


def graph_sizes(vllm_config) -> tuple[int, ...]:
    """Tokens of the graphs that a step with drafts is padded to; empty without such graphs."""
    compilation = getattr(vllm_config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    if mode is None or vllm_config.model_config.enforce_eager or not mode.has_full_cudagraphs():
        return ()
    return tuple(compilation.cudagraph_capture_sizes or ())


def measure_at_warm_up(runner) -> None:
    """Give a goodput policy without a table a coarse one when the KV cache is there: forward passes of rising size.

    They lack what scheduling and sampling take, which the policy learns from the first steps. All ranks run the same
    passes.
    """
    policy = getattr(getattr(runner, "drafter", None), "policy", None)
    if not hasattr(policy, "use_table") or policy.has_table:
        return
    initialize = runner.initialize_kv_cache

    def initialize_kv_cache(*args, **kwargs):
        result = initialize(*args, **kwargs)
        try:
            policy.use_table(_coarse(runner), forward_only=True)
        except Exception as error:
            logger.warning("no step costs measured at warm-up (%s): they are learnt from the first steps", error)
        return result

    runner.initialize_kv_cache = initialize_kv_cache


def _coarse(runner) -> StepCost:
    config = runner.vllm_config
    longest = config.speculative_config.num_speculative_tokens + 1
    requests = config.scheduler_config.max_num_seqs
    most = min(requests * longest, runner.max_num_tokens)
    sizes = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, most})
    sizes = np.array([size for size in sizes if size <= most])
    milliseconds = np.empty(len(sizes))
    for i, size in enumerate(sizes.tolist()):
        times = []
        for _ in range(WARM_UP_REPEATS + 1):
            started = time.perf_counter()
            runner._dummy_run(size)
            runner._sync_device()
            times.append((time.perf_counter() - started) * 1e3)
        milliseconds[i] = min(times[1:])
    logger.info("step costs at warm-up: %s", dict(zip(sizes.tolist(), milliseconds.round(2).tolist(), strict=True)))
    # All tokens count alike in a forward pass.
    counts, per_request = np.unique(np.minimum(requests, 2 ** np.arange(12))), np.arange(1, longest + 1)
    cells = np.interp(counts[:, None] * per_request, sizes, np.maximum.accumulate(milliseconds))
    source = "forward passes at warm-up"
    return StepCost(counts, per_request, np.array([1]), cells[..., None], fingerprint(config), source)
