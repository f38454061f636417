"""`python -m tests.versions.check RUNNER FILE`: what the installed vLLM does with a model runner, as JSON.

40 requests of the matrix (tests/sam/engine/matrix.py): greedy and drawn, with penalties, top-k and top-p, ended by
length, by stop tokens and by stop strings, some aborted, some preempted.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
REQUESTS = range(40)
AFTER_SYNC = range(8)
CUTS = {row: [2] for row in (0, 13, 27)}  # responses that are cut after two tokens or more, and go on as new requests


@dataclass(frozen=True)
class Runner:
    """How engines of one of vLLM's model runners are tried."""

    prepare: Callable[[pytest.MonkeyPatch], None]  # before vLLM is imported, what a CPU lacks
    engine: Callable  # (model, method, asynchronous); method "stock": without this project
    is_stocks: Callable[[int], bool]  # whether the request's tokens have to be those of stock vLLM
    check_zero: Callable[[SimpleNamespace], None]  # fails where a step without drafts does more than stock's


def _first_engine(model, method: str, asynchronous: bool):
    from tests.sam.engine import matrix
    from tests.sam.engine.tiny_engine import Engine

    if method == "stock":  # whose CPU backend fails where a prompt of a seeded request comes in pieces
        whole = {"batch": 40, "max_num_batched_tokens": 4096}
        return Engine(model, logprobs_mode="processed_logprobs", additional_config={}, **whole)
    return matrix.engine(model, method, asynchronous)


def _prepare_first(monkeypatch) -> None:
    from tests.sam.engine import async_cpu

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    async_cpu.install(monkeypatch)
    register_kernels_once(monkeypatch)


def register_kernels_once(monkeypatch) -> None:
    """Where vLLM's CPU platform replaces kernels for each engine, from 0.31 on, do so for the first of this process.

    Root cause: vllm/triton_utils/dispatcher.py asks all that any module holds for `vars(value).get`, and llvmlite's
    `lib` has any attribute, `__dict__` too. Symptom: AttributeError at the start of an engine after numba is imported.
    """
    from vllm.platforms.cpu import CpuPlatform

    name = "register_triton_kernel_overrides"
    if hasattr(CpuPlatform, name):
        monkeypatch.setattr(CpuPlatform, name, staticmethod(functools.cache(getattr(CpuPlatform, name))))


def _second_engine(model, method: str, asynchronous: bool):
    from tests.sam.engine import matrix
    from tests.sam.engine.tiny_engine import Engine

    if method == "stock":
        return Engine(model, logprobs_mode="processed_logprobs", additional_config={}, **matrix.SQUEEZED)
    return matrix.engine(model, method, asynchronous)


def _prepare_second(monkeypatch) -> None:
    from tests.v2 import second_on_cpu

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    second_on_cpu.install()
    register_kernels_once(monkeypatch)


def _is_greedy(row: int) -> bool:
    from tests.sam.engine import matrix

    return matrix.settings(row)["temperature"] == 0.0


def _check_zero_of_second(model) -> None:
    """But for the prompts' step: scheduled asynchronously, vLLM 0.32 writes prompts of `sam` to the device's memory and
    not to the host's (use_dense_all_token_ids)."""
    from tests.v2 import zero

    for is_asynchronous in (False, True):
        stock, own = zero.works(model, is_asynchronous)
        assert stock[2:] == own[2:] and len(stock) >= 16, is_asynchronous


RUNNERS = {
    "first": Runner(_prepare_first, _first_engine, _is_greedy, lambda model: None),
    "second": Runner(_prepare_second, _second_engine, lambda row: True, _check_zero_of_second),
}


def load(engine, weights) -> None:
    """As verl's weight sync."""
    from tests.sam.engine.test_weight_sync import as_verl

    as_verl(engine.runner, weights, None)


def check(runner: Runner, folder: Path) -> dict:
    """Fails at the first difference."""
    from tests.sam.engine import matrix
    from tests.sam.engine.test_weight_sync import train, weights_of

    model = matrix.save(folder / "first")
    untrained = SimpleNamespace(path=model.path)
    new_weights = weights_of(train(model, folder / "trained"))
    with runner.engine(untrained, "stock", False) as engine:
        stock = matrix.run(engine, REQUESTS)
    with runner.engine(untrained, "off", False) as engine:
        off = matrix.run(engine, REQUESTS)
        load(engine, new_weights)
        of_new_weights = matrix.run(engine, AFTER_SYNC)
    assert any(of_new_weights[row].tokens != off[row].tokens for row in AFTER_SYNC)
    matrix.assert_same(off, stock, [row for row in REQUESTS if runner.is_stocks(row)], by=1e-4)
    result = {"requests": len(REQUESTS)}
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        with runner.engine(untrained, "sam", asynchronous) as engine:
            matrix.assert_same(matrix.run(engine, REQUESTS), off, REQUESTS)
            found = engine.count()
            assert found["accepted"] > 20 and found["preemptions"] > 0, found
            assert not any(value for counter, value in engine.counters().items() if counter.endswith("_errors"))
            matrix.assert_same(matrix.run(engine, CUTS, CUTS), off, [*CUTS])
            load(engine, new_weights)
            matrix.assert_same(matrix.run(engine, AFTER_SYNC), of_new_weights, AFTER_SYNC)
            result[name] = {key: int(found[key]) for key in ("drafted", "accepted")}
    runner.check_zero(untrained)
    return result


def main(name: str, file: str) -> None:
    runner = RUNNERS[name]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        runner.prepare(monkeypatch)
        Path(file).write_text(json.dumps(check(runner, Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
