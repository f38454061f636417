"""Engines with vLLM's second runner, and which requests of the matrix they are asked."""

import numpy as np
import torch

from sam.config import SpeculationConfig
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.tiny_engine import Engine

# Two that are aborted, and siblings of every kind with longer prompts; no response has more than 35 tokens.
ROWS = (14, 22, 90, 91, 92, 93, 94, 98, 99, 100, 101, 107, 108, 110)

# So few blocks that requests are preempted, so small steps that prompts come in pieces beside drafts.
SQUEEZED = {
    "block_size": 32, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 48,
    "logprobs_mode": "processed_logprobs",
}  # fmt: skip
FEW = {"policy": "always", "num_speculative_tokens": 3}  # drawing takes most of the time in Triton's interpreter


def engine(model, method=None, speculation=None, asynchronous=False, **arguments) -> Engine:
    """Without a method vLLM's own, with nothing of this project's in its config."""
    own = {"additional_config": {}}
    if method:
        own = SpeculationConfig(method=method, **FEW | (speculation or {})).vllm_arguments()
    return Engine(model, asynchronous=asynchronous, **{"batch": 16} | own | arguments)


def counters_of(worker) -> dict[str, int]:
    """In the worker: what its speculator has counted."""
    return dict(worker.model_runner.speculator.counters)


def watch(patch, own) -> list[tuple[int, int]]:
    """Of each step from now on: waits of the host, copies of drafts to the device."""
    from sam.vllm.v2 import speculator  # not before vLLM is mended

    steps, copies, core = [], [], own.llm.llm_engine
    copy, step = speculator.async_tensor_h2d, core.step

    def counted_copy(*arguments, **keywords):
        copies.append(arguments)
        return copy(*arguments, **keywords)

    def counts() -> np.ndarray:
        return np.array([Event.waits, len(copies)])

    def counted_step():
        before = counts()
        outputs = step()
        steps.append(tuple((counts() - before).tolist()))
        return outputs

    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(speculator, "async_tensor_h2d", counted_copy)
    patch.setattr(core, "step", counted_step)
    return steps
