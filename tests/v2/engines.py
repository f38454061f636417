"""Engines with vLLM's second runner, and which requests of the matrix they are asked."""

from sam.config import SpeculationConfig
from sam.vllm.v2.engine import engine_arguments
from tests.sam.engine.tiny_engine import Engine

# Two that are aborted, and siblings of every kind with longer prompts; no response has more than 35 tokens.
ROWS = (14, 22, 90, 91, 92, 93, 94, 98, 99, 100, 101, 107, 108, 110)


def engine(model, method=None, speculation=None, asynchronous=False, **arguments) -> Engine:
    """Without a method vLLM's own, with nothing of this project's in its config."""
    own = {"additional_config": {}}
    if method:
        own = engine_arguments(SpeculationConfig(method=method, **{"policy": "always"} | (speculation or {})))
    return Engine(model, asynchronous=asynchronous, **{"batch": 16} | own | arguments)


def counters_of(worker) -> dict[str, int]:
    """In the worker: what its speculator has counted."""
    return dict(worker.model_runner.speculator.counters)
