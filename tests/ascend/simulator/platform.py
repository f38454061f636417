"""What vllm-ascend and vLLM ask about their device, answered for a CPU; HCCL becomes gloo, one kernel plain PyTorch."""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path

import torch


class _Torch(types.ModuleType):
    """torch, but an "npu" device is the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(*arguments, **keywords):
        if arguments and str(arguments[0]).startswith("npu"):
            return torch.device("cpu")
        return torch.device(*arguments, **keywords)


class SlotMapping:
    """vLLM's Triton kernel `_compute_slot_mapping_kernel`, which needs a device."""

    def __getitem__(self, grid):
        def launch(count, padded, starts, positions, block_table, _stride, size, slots, *, PAD_ID, **_):
            slots[count:padded] = PAD_ID
            requests = torch.arange(grid[0] - 1).repeat_interleave(starts[: grid[0]].diff())
            where = positions[: len(requests)]
            slots[: len(requests)] = block_table[requests, where // size] * size + where % size

        return launch


def _register_composite(
    op_name, op_func, mutates_args=None, fake_impl=None, target_lib=None, dispatch_key=None, tags=()
):
    """Custom operators as compositions, so that a graph's recorder sees what they are made of."""
    import vllm.utils.torch_utils as torch_utils
    from torch.library import infer_schema

    library = target_lib or torch_utils.vllm_lib
    library.define(op_name + infer_schema(op_func, mutates_args=mutates_args or []), tags=tags)
    library.impl(op_name, op_func, dispatch_key="CompositeImplicitAutograd")


def install() -> None:
    import vllm.utils.torch_utils as torch_utils

    torch_utils.direct_register_custom_op = _register_composite

    import vllm_ascend.platform as ascend_platform

    platform = ascend_platform.NPUPlatform
    platform.device_type, platform.dispatch_key = "cpu", "CPU"
    platform.is_pin_memory_available = classmethod(lambda _: False)

    def missing(_self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.npu, name, None)

    platform.__getattr__ = missing

    import vllm_ascend.worker.worker as worker  # first: in another order vllm-ascend's modules import in a circle

    # isort: split
    import vllm_ascend.worker.block_table as block_table
    import vllm_ascend.worker.model_runner_v1 as model_runner
    from vllm.config import CUDAGraphMode

    worker.torch = _Torch("torch")
    start_distributed = worker.init_distributed_environment

    def start_gloo(size, rank, method, local_rank, backend=None):
        # By a file: the port in `method` was free when vLLM chose it and can be taken by now. Ranks share their parent.
        meeting = Path(tempfile.gettempdir(), f"ranks-{os.getppid()}-{method.rpartition(':')[2]}")
        start_distributed(size, rank, f"file://{meeting}", local_rank, "gloo")

    worker.init_distributed_environment = start_gloo
    block_table._compute_slot_mapping_kernel = SlotMapping()
    # The published condition asks for compilation, which there is none of here.
    model_runner.NPUModelRunner._use_aclgraph = lambda self: (
        self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    )
