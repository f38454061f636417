"""Engines with vLLM's second runner, and which requests of the matrix they are asked."""

from sam.config import SpeculationConfig
from tests.sam.engine.tiny_engine import Engine

# Two that are aborted, and siblings of every kind with longer prompts; no response has more than 35 tokens.
ROWS = (14, 22, 90, 91, 92, 93, 94, 98, 99, 100, 101, 107, 108, 110)

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
