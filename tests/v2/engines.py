"""Engines with vLLM's second runner, and requests that stock vLLM and sam have to answer alike."""

import contextlib
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sam.config import SpeculationConfig
from sam.vllm.v2.engine import engine_arguments
from tests.sam.engine.tiny_engine import VOCABULARY, started


@dataclass
class Run:
    """Answers by request, and what the engine counted.

    Attributes:
        tokens: of each sequence.
        logprobs: of each sequence's entries, by token.
        text: of each sequence.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    logprobs: dict[str, list[list[dict[int, float]]]] = field(default_factory=dict)
    text: dict[str, list[str]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def take(self, outputs) -> None:
        for output in outputs:
            self.tokens[output.request_id] = [list(one.token_ids) for one in output.outputs]
            self.text[output.request_id] = [one.text for one in output.outputs]
            self.logprobs[output.request_id] = [
                [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs or []]
                for one in output.outputs
            ]

    @property
    def accepted(self) -> float:
        return self.metrics.get("vllm:spec_decode_num_accepted_tokens", 0)

    @property
    def drafted(self) -> float:
        return self.metrics.get("vllm:spec_decode_num_draft_tokens", 0)


@contextlib.contextmanager
def engine(
    model, method: str | None, speculation: dict[str, Any] | None = None, asynchronous: bool = False, **arguments
):
    """vLLM's LLM; without a method vLLM's own, with nothing of this project's in its config."""
    ours = {}
    if method:
        config = SpeculationConfig(method=method, **{"policy": "always"} | (speculation or {}))
        ours = engine_arguments(config)
    with started(
        **{
            "model": model.path,
            "max_model_len": 256,
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
            "max_num_seqs": 16,
            "disable_log_stats": False,
            "async_scheduling": asynchronous,
            **ours,
            **arguments,
        }
    ) as llm:
        yield llm


def runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def config_of(llm) -> SpeculationConfig:
    return SpeculationConfig.from_vllm(runner_of(llm).vllm_config)


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def answers(llm, requests, after_step=None) -> Run:
    """The answers to (name, prompt, settings of SamplingParams); `after_step` is called with llm and the step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    common = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "max_tokens": 16}
    common["output_kind"] = RequestOutputKind.FINAL_ONLY
    for row, (name, prompt, settings) in enumerate(requests):
        parameters = SamplingParams(**common | {"seed": row} | settings)
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    run, step = Run(), 0
    while llm.llm_engine.has_unfinished_requests():
        step += 1
        run.take(llm.llm_engine.step())
        if after_step:
            after_step(llm, step)
    for metric in llm.get_metrics():
        if isinstance(value := getattr(metric, "value", None), int | float):
            run.metrics[metric.name] = run.metrics.get(metric.name, 0) + value
    run.counters = llm.collective_rpc(counters_of)[0]
    return run


def counters_of(worker) -> dict[str, int]:
    """In the worker: what its speculator has counted."""
    return dict(getattr(worker.model_runner.speculator, "counters", {}))


def prompts(number: int, length: int = 6) -> list[list[int]]:
    """Of which the second half repeats the first."""
    generator = np.random.default_rng(length)
    return [generator.integers(0, VOCABULARY, length // 2).tolist() * 2 for _ in range(number)]
