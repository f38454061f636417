"""Runs the real torch-npu, vLLM and vllm-ascend without an NPU: their device calls are answered on the CPU.

Simulated are the device's runtime, the fused operators that a Qwen3 calls, and recording and replaying ACL graphs.
Everything else is the published code. `install()` comes before vllm_ascend is imported; the libraries that
stubs.py builds must be on LD_LIBRARY_PATH and TORCH_DEVICE_BACKEND_AUTOLOAD must be 0.
"""


def install() -> None:
    from tests.ascend.simulator import graph, operators, pieces, platform, runtime

    for part in (runtime, operators, graph, platform, pieces):
        part.install()
