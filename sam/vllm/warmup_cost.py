"""Step costs for the goodput policy of a vLLM engine: from a file, or coarse ones measured when it starts."""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sam.config import SpeculationConfig
from sam.switch.step_cost import StepCost
from sam.vllm import patches

logger = logging.getLogger(__name__)

REPEATS = 3
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # tokens of the forward passes
# For all of them: where large ones do not fit in, a switch would not draft at such sizes.
BUDGET_SECONDS = 5.0


def table_of(config: SpeculationConfig) -> StepCost | None:
    """The user's table for goodput, if there is one; ValueError if it cannot be used."""
    return StepCost.load(Path(config.step_cost)) if config.step_cost and config.policy == "goodput" else None


def graph_mode(vllm_config):
    """vLLM's CUDAGraphMode; None where an engine has no graphs."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return None if mode is None or mode.name == "NONE" or vllm_config.model_config.enforce_eager else mode


def graph_sizes(vllm_config) -> tuple[int, ...]:
    """Tokens of the graphs that a step with drafts is padded to; empty without such graphs."""
    mode = graph_mode(vllm_config)
    is_full = mode is not None and mode.has_full_cudagraphs()
    return tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()) if is_full else ()


def measure_at_warm_up(runner) -> None:
    """Give a goodput policy without a table a coarse one while the engine starts: forward passes of rising size, once
    the KV cache is there and graphs are captured, since a pass before that would begin a capture.

    They lack what scheduling and sampling take, which the policy learns from the first steps. The table is not kept for
    the next start: a kept one may be of a machine that was busy.
    """
    policy = runner.drafter.policy
    if not hasattr(policy, "use_table") or policy.has_table:
        return
    last = "capture_model" if graph_mode(runner.vllm_config) else "initialize_kv_cache"

    def prepare_and_measure(prepare, *args, **kwargs):
        result = prepare(*args, **kwargs)
        try:
            policy.use_table(_coarse(runner), forward_only=True)
            getattr(runner.drafter, "measure_passes", lambda: None)()
        except Exception as error:  # vLLM's or a device's, of any kind: a rollout needs no table
            logger.warning("no step costs measured at warm-up (%s): they are learnt from the first steps", error)
        return result

    patches.wrap(runner, last, "measure_at_warm_up", prepare_and_measure)


def _coarse(runner) -> StepCost:
    """Tokens count alike in a forward pass: on the lines between the passes, and beyond them as from the middle one to
    the last."""
    from vllm.distributed.parallel_state import get_world_group

    config = runner.vllm_config
    longest = config.speculative_config.num_speculative_tokens + 1
    requests = config.scheduler_config.max_num_seqs
    most = min(requests * longest, runner.max_num_tokens)
    agreed = functools.partial(get_world_group().broadcast_object, src=0)  # the first rank's
    sizes, milliseconds = measured(functools.partial(_forward_pass, runner), most, agreed)
    logger.info("step costs at warm-up: %s", dict(zip(sizes.tolist(), milliseconds.round(2).tolist(), strict=True)))
    counts = np.unique(np.minimum(requests, 2 ** np.arange(12)))
    per_request = np.arange(1, longest + 1)
    num_tokens = counts[:, None] * per_request
    middle = len(sizes) // 2
    slope = (milliseconds[-1] - milliseconds[middle]) / max(1, sizes[-1] - sizes[middle])
    cells = np.interp(num_tokens, sizes, milliseconds) + slope * np.maximum(0, num_tokens - sizes[-1])
    return StepCost(counts, per_request, np.array([1]), cells[..., None], source="forward passes at warm-up")


def measured(
    forward_pass: Callable[[int], None], most: int, agreed: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray]:
    """Time forward passes of up to `most` tokens within `BUDGET_SECONDS`: int64 [n], tokens; float64 [n], milliseconds.

    Other work on the machine makes passes longer: the fastest of a size counts, and none is slower than a larger one.
    `agreed` gives the number that all ranks go by, given this rank's: they must run the same passes.
    """
    ends = time.perf_counter() + BUDGET_SECONDS
    seconds = {}

    def timed(size: int) -> float:
        started = time.perf_counter()
        forward_pass(size)
        return time.perf_counter() - started

    per_token = timed(1)
    for size in [*(size for size in SIZES if size < most), most]:
        if not agreed(int(time.perf_counter() + (1 + REPEATS) * per_token * size < ends)):
            break
        forward_pass(size)  # the first of a size may compile or allocate
        seconds[size] = min(timed(size) for _ in range(REPEATS))
        per_token = seconds[size] / size
    if len(seconds) < min(2, most):
        raise ValueError(f"a pass of few tokens takes {per_token:.1f} s")
    rising = np.minimum.accumulate(list(seconds.values())[::-1])[::-1]
    return np.array(list(seconds)), rising * 1e3


def _forward_pass(runner, size: int) -> None:
    from vllm.distributed.parallel_state import get_pp_group

    config = runner.vllm_config
    graphs = (config.compilation_config.cudagraph_capture_sizes or ()) if graph_mode(config) else ()
    # vllm-ascend's dummy run pads tokens and requests to a graph of whole steps, but not what it counts of each.
    hidden = runner._dummy_run(min((graph for graph in graphs if graph >= size), default=size))
    if get_pp_group().is_last_rank:
        # Each token of a step with drafts has its logits. vllm-ascend's returns all hidden states alone.
        runner.model.compute_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[:size])
    getattr(runner, "_sync_device", torch.accelerator.synchronize)()
