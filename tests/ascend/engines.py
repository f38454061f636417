"""Engines of the real vllm-ascend on the simulated NPU, one after another in this process."""

import vllm_ascend.utils
from vllm_ascend.compilation import acl_graph

from tests.sam.engine.tiny_engine import Engine

ROWS = range(64)  # requests of the matrix that are asked
# vllm-ascend's blocks have 128 tokens, whatever is asked: of 17 one is never used.
SQUEEZED = {"batch": 40, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 112}


def engine(model, method=None, asynchronous=False, graph=None, **arguments) -> Engine:
    """An engine in which requests are preempted and prompts come in pieces.

    Args:
        graph: vLLM's cudagraph_mode; None: eager.
        arguments: further ones of tests.sam.engine.tiny_engine.Engine.
    """
    # vllm-ascend expects one engine a process, and one model.
    acl_graph._graph_params = acl_graph._draft_graph_params = vllm_ascend.utils._IS_MOE_MODEL = None
    if graph:
        mode = 3 if graph == "PIECEWISE" else 0  # vLLM's compilation cuts the model in pieces
        graphs = {"mode": mode, "cudagraph_mode": graph, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        arguments |= {"enforce_eager": False, "compilation_config": graphs}
    arguments = {"logprobs_mode": "processed_logprobs", **SQUEEZED, **arguments}
    return Engine(model, method, asynchronous=asynchronous, **arguments)
