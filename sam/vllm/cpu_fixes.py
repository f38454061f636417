"""Repairs of vLLM's CPU backend that training needs: by sam.vllm.plugin, where speculation is configured.

The largest is of linear layers: weights that a weight sync can load, rows that do not depend on the batch.
Root cause: `dispatch_cpu_unquantized_gemm` in vllm/model_executor/layers/utils.py packs the weight for oneDNN's kernel
and puts an empty parameter in its place. Symptom: the second weight sync fails with "Attempted to load weight ([128,
128]) into parameter ([0])". Second, the kernel's sums depend on the number of rows: sam.vllm.cpu_linear is used in its
place, which packs nothing. Can go when vLLM's CPU backend supports reloading weights and a batch-invariant mode.
"""

import functools
import logging
import os
from collections import Counter

import numba
import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

from sam.config import SpeculationConfig
from sam.vllm import patches
from sam.vllm.cpu_linear import KERNEL, cost, linear

logger = logging.getLogger(__name__)
SLOW = 1.3  # times stock's time from which a user is told
MEASURED_ROWS = (1, 4, 16)  # of steps for which speculation is there


def open_doors() -> None:
    """Replace what has to be replaced before a model runner is made."""
    _define_operator()
    patches.put(utils, "dispatch_cpu_unquantized_gemm", "multiply_invariantly", attach)


def install(runner, config: SpeculationConfig) -> None:
    """Put into a model runner what does not have to be there before it is made."""
    if config.batch_invariant == "off":
        # What loads weights without `attach`. What else writes weights does not on a CPU.
        for owner, name in ((runner.model, "load_weights"), (runner, "reload_weights")):
            patches.wrap(owner, name, "pack_after_loads", functools.partial(_load_and_pack, runner.model))
    if hasattr(runner, "_bookkeeping_sync"):
        patches.wrap(runner, "_bookkeeping_sync", "keep_unread_generators", functools.partial(_keep_generators, runner))
    if type(getattr(runner, "drafter", None)).__name__ == "NgramProposer":
        # Root cause: its `propose` lets numba start its threads, which sets OpenMP's number to all processors. Symptom:
        # matrix products are divided otherwise from then on, and log-probabilities may differ by some 1e-6.
        threads = torch.get_num_threads()
        numba.get_num_threads()  # starts them
        torch._C.set_num_threads(threads)  # vLLM has emptied the public one
    if config.batch_invariant != "off":
        # Root cause: vLLM's CPU attention divides a long context among threads that are idle, and adds the parts up.
        # Symptom: about one response of 200 tokens in a thousand differs by a token. vLLM reads its own switch after
        # the model is loaded. Can go when it is off by default.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        _say_if_slow(runner.model)


def _keep_generators(runner, bookkeeping_sync, *arguments, **keywords):
    batch = runner.input_batch
    kept = batch.generators
    batch.generators = {}
    try:
        return bookkeeping_sync(*arguments, **keywords)
    finally:
        batch.generators = kept


def attach(layer: torch.nn.Module, remove_weight: bool = False) -> None:
    """Give a layer its `cpu_linear`; by vLLM's own way in another engine of this process, for which no speculation is
    configured."""
    engine = get_current_vllm_config_or_none()
    weight = layer.weight
    config = engine and SpeculationConfig.from_vllm(engine)
    if engine is not None and config is None:
        _vllms(layer, remove_weight)
    elif weight.is_meta:  # a layer of another pipeline rank
        layer.cpu_linear = torch.nn.functional.linear
    elif weight.ndim == 2:  # not a convolution, which has a kernel of its own
        if config and config.batch_invariant == "off":
            _pack(layer)
        else:
            layer.cpu_linear = multiply


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear`, in compiled graphs as an operator."""
    return (torch.ops.sam.cpu_linear if torch.compiler.is_compiling() else linear)(x, weight, bias)


def _pack(layer: torch.nn.Module) -> None:
    """Give a layer vLLM's own kernel, of its weight as it is now."""
    try:
        with torch.inference_mode(False):
            pack = ops.create_onednn_mm(layer.weight.detach().t(), 32)  # kernels kept, as vLLM's own
    except RuntimeError:  # of a dtype for which this processor has none
        layer.cpu_linear = torch.nn.functional.linear
        return
    present = layer.__dict__.setdefault("sam_pack", pack)
    if present is not pack:  # compiled graphs hold the tensor of its address; `pack` takes the older one's with it
        older = present.handler_tensor.clone()
        present.handler_tensor.copy_(pack.handler_tensor)
        pack.handler_tensor = older
    layer.cpu_linear = lambda x, weight, bias=None: ops.onednn_mm(present, x, bias)


def describe() -> str:
    """The kernel, and its time over that of vLLM's own; under a second once it is compiled."""
    costs = _costs(torch.randn(3072, 576))
    of_rows = ", ".join(f"{cost:.2f}x with {rows}" for rows, cost in costs.items())
    return f"linear layers by a kernel of ours ({KERNEL}); time over stock vLLM's: {of_rows} rows"


def _say_if_slow(model: torch.nn.Module) -> None:
    """Warn where the layers that take most of a step are slower than vLLM's own by more than SLOW."""
    layers = [layer for layer in model.modules() if getattr(layer, "cpu_linear", None) is multiply]
    sizes = Counter()
    for layer in layers:
        sizes[layer.weight.shape] += layer.weight.numel()
    if not sizes:
        return
    shape, _ = sizes.most_common(1)[0]
    weight = next(layer.weight for layer in layers if layer.weight.shape == shape)
    for rows, factor in _costs(weight.detach()).items():
        if factor > SLOW:
            logger.warning(
                "linear layers of %d x %d take %.1f times stock vLLM's time with %d rows (%s): where equal tokens do "
                "not matter, speculation.batch_invariant=off has stock's",
                *shape, factor, rows, KERNEL,
            )  # fmt: skip
            return


def _costs(weight: torch.Tensor) -> dict[int, float]:
    """By rows, the time of our product over that of vLLM's own."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    _vllms(layer, False)
    return {rows: cost(weight, rows, lambda x: layer.cpu_linear(x, weight, None)) for rows in MEASURED_ROWS}


def _load_and_pack(model: torch.nn.Module, load, *arguments, **keywords):
    try:
        return load(*arguments, **keywords)
    finally:
        for layer in model.modules():
            if hasattr(layer, "sam_pack") and not layer.weight.is_meta:  # as while it is read from disk again
                _pack(layer)


_vllms = utils.dispatch_cpu_unquantized_gemm


@functools.cache
def _define_operator() -> torch.library.Library:
    """`torch.ops.sam.cpu_linear`, which torch.compile leaves as it is."""
    library = torch.library.Library("sam", "FRAGMENT")
    library.define("cpu_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("cpu_linear", linear, "CPU")
    only_shape = lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0]))  # noqa: E731
    torch.library.register_fake("sam::cpu_linear", only_shape, lib=library)
    return library
