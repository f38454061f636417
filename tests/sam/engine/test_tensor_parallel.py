"""Two tensor-parallel ranks: one drafts, and neither what the other knows nor how fast it is changes a token."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from sam.config import SpeculationConfig
from tests.sam.engine.tiny_engine import VOCABULARY, save_model

pytestmark = pytest.mark.engine

REQUESTS, LENGTH = 24, 60


class Ranks:
    """Mixed into vLLM's worker; the methods are called through `collective_rpc`."""

    def prepare(self) -> None:
        """Make the second rank slow, and give it another context: its drafter holds other text."""
        if self.rank == 0:
            return
        proposer, execute = self.model_runner.drafter, self.model_runner.execute_model
        proposer.drafter.start("other text", np.arange(VOCABULARY, dtype=np.int32), 0)

        def slow(*args, **kwargs):
            time.sleep(0.004)
            return execute(*args, **kwargs)

        self.model_runner.execute_model = slow

    def draft(self, always: bool) -> None:
        self.model_runner.drafter.policy.batch_size_threshold = 1000 if always else 0

    def counters(self) -> dict[str, int]:
        return dict(self.model_runner.drafter.counters)


def test_one_rank_drafts_and_no_token_changes(tmp_path, monkeypatch):
    # A pipe for each worker, whose start takes half of this test.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    from vllm import LLM, SamplingParams

    shared_before = set(Path("/dev/shm").glob("*-cpushm_*"))
    model = save_model(tmp_path / "model")
    speculation = SpeculationConfig(policy="threshold", batch_size_threshold=1000)
    llm = LLM(
        model=model.path, skip_tokenizer_init=True, max_model_len=256, dtype="float32", enforce_eager=True, seed=0,
        tensor_parallel_size=2, distributed_executor_backend="mp", kv_cache_memory_bytes=64 << 20,
        worker_extension_cls="tests.sam.engine.test_tensor_parallel.Ranks", **speculation.vllm_arguments(),
    )  # fmt: skip
    generator = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": generator.integers(0, VOCABULARY, 8).tolist()} for _ in range(REQUESTS)]
    sampling = [
        SamplingParams(max_tokens=LENGTH - row, seed=row, temperature=row % 2, ignore_eos=True, detokenize=False)
        for row in range(REQUESTS)
    ]
    try:
        llm.collective_rpc("prepare")
        tokens = []
        for always in (True, False):
            llm.collective_rpc("draft", args=(always,))
            tokens.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)])
        first, second = llm.collective_rpc("counters")
    finally:
        llm.llm_engine.engine_core.shutdown()
        # vLLM's ranks on a CPU leave the memory through which they speak (csrc/cpu/shm.cpp).
        for memory in set(Path("/dev/shm").glob("*-cpushm_*")) - shared_before:
            memory.unlink()
    assert tokens[0] == tokens[1]
    assert first["tracked_requests"] >= REQUESTS and first["draft_errors"] == second["draft_errors"] == 0
    assert second["tracked_requests"] == 0
