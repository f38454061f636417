"""PIECEWISE graphs on the CPU: vLLM's splitting operators run anew in every step, with that step's attention arguments.

vLLM lets torch.compile cut the model there and vllm-ascend capture each piece. Here nothing is compiled: the model is
recorded once for a size, and such an operator as one call, whose insides are not. Which step replays which size is
decided by the published code.
"""

from __future__ import annotations

import torch

from tests.ascend.simulator import graph


class Pieces:
    """In place of a compiled model's forward."""

    def __init__(self, forward, compilation_config):
        self._forward = forward
        self._splitting = tuple(compilation_config.splitting_ops)
        self._captured: dict = {}

    def __call__(self, *arguments, **keywords):
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
            return self._forward(*arguments, **keywords)
        if recorded := self._captured.get(context.batch_descriptor):
            pieces, output = recorded
            pieces.replay()
            return output
        validate_cudagraph_capturing_enabled()
        pieces = graph.NPUGraph()
        with graph.capture(pieces, whole=self._splitting):
            output = self._forward(*arguments, **keywords)
        self._captured[context.batch_descriptor] = pieces, output
        return output


def install() -> None:
    """After vllm-ascend's worker has been imported: in another order its modules import in a circle."""
    from vllm.compilation import decorators
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    decorators._should_ignore_torch_compile = lambda _: True
    load = NPUModelRunner.load_model

    def load_model(self, *arguments, **keywords):
        load(self, *arguments, **keywords)
        if self.compilation_config.cudagraph_mode.requires_piecewise_compilation():
            for module in self.get_model().modules():
                if isinstance(module, torch.nn.Module) and hasattr(module, "do_not_compile"):
                    module.forward = Pieces(module.forward, self.compilation_config)

    NPUModelRunner.load_model = load_model
