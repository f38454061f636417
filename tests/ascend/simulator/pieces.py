"""PIECEWISE graphs on the CPU: a model cut at vLLM's own splitting operators, its pieces captured and replayed.

vLLM lets torch.compile cut the model and vllm-ascend capture each piece. Here nothing is compiled: the model runs once,
is cut where such an operator is called, and each piece is recorded; the operators between them run anew in every step,
with that step's attention arguments. Which step replays which size is decided by the published code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simulator import graph


@dataclass
class _Between:
    function: object
    arguments: tuple
    keywords: dict

    def replay(self) -> None:
        self.function(*self.arguments, **self.keywords)


class _Cutter(TorchDispatchMode):
    def __init__(self, splitting: list[str]):
        super().__init__()
        self.splitting = splitting
        self.parts: list = [graph.NPUGraph()]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() in self.splitting:
            self.parts += [_Between(func, args, kwargs), graph.NPUGraph()]
            graph.continue_in(self.parts[-1])
            return func(*args, **kwargs)
        if func.namespace == "vllm":  # made of others
            with self:
                return func.decompose(*args, **kwargs)
        output = func(*args, **kwargs)
        self.parts[-1].record(func.name(), func, args, kwargs, output)
        return output


class Pieces:
    """In place of a compiled model's forward."""

    def __init__(self, forward, compilation_config):
        self._forward = forward
        self._config = compilation_config
        self._captured: dict = {}

    def __call__(self, *arguments, **keywords):
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
            return self._forward(*arguments, **keywords)
        size = context.batch_descriptor
        if size not in self._captured:
            validate_cudagraph_capturing_enabled()
            cutter = _Cutter(self._config.splitting_ops)
            with graph.recording(cutter.parts[0]), cutter:
                output = self._forward(*arguments, **keywords)
            self._captured[size] = cutter.parts, output
            return output
        parts, output = self._captured[size]
        for part in parts:
            part.replay()
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
