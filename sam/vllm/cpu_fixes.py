"""Repairs of vLLM's CPU backend that training needs: by sam.vllm.plugin, where speculation is configured.

The largest is of linear layers: weights that a weight sync can load, rows that do not depend on the batch.
Root cause: `dispatch_cpu_unquantized_gemm` in vllm/model_executor/layers/utils.py packs the weight for oneDNN's kernel
and puts an empty parameter in its place. Symptom: the second weight sync fails with "Attempted to load weight ([128,
128]) into parameter ([0])". Here the packed copy lies beside the weight and is made at the first use after a load.
Second, the kernel's sums depend on the number of rows here and there: it is called with numbers of rows that agree
(sam.vllm.row_classes). Can go when vLLM's CPU backend supports reloading weights and a batch-invariant mode.
"""

import functools
import itertools
import logging
import os
import sys
import weakref

import numba
import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

from sam.config import SpeculationConfig
from sam.vllm import patches, row_classes
from sam.vllm.row_classes import RowClass

logger = logging.getLogger(__name__)

# More than ROUND_TO rows of layers with fewer weights are padded to multiples of it: for every number of rows that is
# new oneDNN compiles a kernel for 0.15 to 0.6 ms, which such a layer does not earn back.
SMALL_WEIGHTS = 100_000
ROUND_TO = 8
# Whether the weight is packed. All runs that are compared must choose alike, since the two kernels round differently.
PREFERENCE = (True, False)
KERNELS_KEPT = 32  # as vLLM's own
# torch's own kernel gets so many rows even where fewer agree: which do changes with threads, which change later.
LEAST_ROWS = 32
LAST_RESORT = RowClass(32, 2048)  # where no two numbers of rows agree
ANY_ROWS = RowClass(0, sys.maxsize)


def open_doors() -> None:
    """Replace what has to be replaced before a model runner is made."""
    _define_operator()
    patches.put(utils, "dispatch_cpu_unquantized_gemm", "multiply_invariantly", attach)


def install(runner, config: SpeculationConfig) -> None:
    """Put into a model runner what does not have to be there before it is made."""
    # All weights are packed again after what loads them without `attach`. What else writes weights does not on a CPU.
    for owner, name in ((runner.model, "load_weights"), (runner, "reload_weights")):
        patches.wrap(owner, name, "pack_after_loads", _load_and_forget)
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


def _keep_generators(runner, bookkeeping_sync, *arguments, **keywords):
    batch = runner.input_batch
    kept, batch.generators = batch.generators, {}
    try:
        return bookkeeping_sync(*arguments, **keywords)
    finally:
        batch.generators = kept


def attach(layer: torch.nn.Module, remove_weight: bool = False) -> None:
    """Give a layer its `cpu_linear`, which packs its weight again: after loading weights and every weight sync; not in
    another engine of this process, for which no speculation is configured."""
    engine = get_current_vllm_config_or_none()
    if engine is not None and SpeculationConfig.from_vllm(engine) is None:
        _vllms(layer, remove_weight)
        return
    weight = layer.weight
    if weight.is_meta:  # a layer of another pipeline rank
        layer.cpu_linear = torch.nn.functional.linear
    elif weight.ndim == 2:  # not a convolution, which has a kernel of its own
        present = getattr(layer, "cpu_linear", None)
        if isinstance(present, CpuLinear) and (present.shape, present.dtype) == (tuple(weight.shape), weight.dtype):
            present.forget()
        else:
            layer.cpu_linear = CpuLinear(layer)


def _load_and_forget(load, *arguments, **keywords):
    try:
        return load(*arguments, **keywords)
    finally:
        for linear in list(_linears.values()):
            linear.forget()


class CpuLinear:
    """`torch.nn.functional.linear` of a layer, by one kernel and with numbers of rows that give equal bits."""

    def __init__(self, layer: torch.nn.Module):
        weight, engine = layer.weight, get_current_vllm_config_or_none()
        config = engine and SpeculationConfig.from_vllm(engine)
        mode = config.batch_invariant if config else "auto"
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.packed, self.row_class = _kernel_and_row_class(weight, getattr(layer, "bias", None) is not None, mode)
        self.multiple = ROUND_TO if self.packed and weight.numel() < SMALL_WEIGHTS and mode != "off" else 1
        self._pack = None
        with torch.inference_mode(False):
            self._key = torch.tensor(next(_numbers))  # a tensor, so that compiled graphs take it as an input
        _linears[int(self._key)] = self

    def forget(self) -> None:
        """Pack again at the next use."""
        self._pack = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.multiply(x, weight, bias)
        return torch.ops.sam.cpu_linear(x, weight, bias, self._key)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., inner], weight [columns, inner], bias [columns]; returns [..., columns]."""
        if self.packed and self._pack is None:
            self._pack = _pack(weight)
        rows = x.reshape(-1, self.shape[1]).contiguous()
        result = row_classes.multiply(_product(self._pack, weight, bias), rows, self.row_class, self.multiple)
        return result if x.dim() == 2 else result.reshape(*x.shape[:-1], self.shape[0])


def _kernel_and_row_class(weight: torch.Tensor, has_bias: bool, mode: str) -> tuple[bool, RowClass]:
    """Whether to use the packed kernel, and its numbers of rows: by shape, dtype and machine only, so that engines that
    are compared agree."""
    (columns, inner), dtype = weight.shape, weight.dtype
    if mode == "off":
        try:
            return _pack(weight[:64]) is not None, ANY_ROWS  # as a whole it is packed at its first use
        except RuntimeError:
            return False, ANY_ROWS
    for packed in PREFERENCE:
        name = f"{'packed' if packed else 'plain'} {dtype} {columns}x{inner}{' bias' if has_bias else ''}"
        compare = functools.partial(_compare, packed, (columns, inner), dtype, has_bias)
        if (row_class := row_classes.known_or_found(name, compare)) is not None:
            return packed, row_class if packed else row_class._replace(smallest=max(LEAST_ROWS, row_class.smallest))
    logger.warning(
        "a linear layer of %s x %s weights in %s has no kernel here whose rows do not depend on the batch: tokens may "
        "differ between speculation on and off", columns, inner, dtype,
    )  # fmt: skip
    return False, LAST_RESORT


def _compare(packed: bool, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> RowClass | None:
    """`row_classes.find_row_class` of a kernel with weights for it, with a bias too where the layer has one."""
    with torch.inference_mode():
        weight = row_classes.rounding_sensitive(*shape, dtype, seed=1, sign=-1)
        biases = [None, weight[:, 0] * 2.0**-24] if has_bias else [None]
        try:
            pack = _pack(weight) if packed else None
            return row_classes.find_row_class([_product(pack, weight, bias) for bias in biases], *shape, dtype)
        except RuntimeError:  # of a dtype for which this processor has no packed kernel
            return None


def _pack(weight: torch.Tensor):
    if not ops._supports_onednn:
        raise RuntimeError("vLLM was built without oneDNN")
    return ops.create_onednn_mm(weight.t(), KERNELS_KEPT)


def _product(pack, weight: torch.Tensor, bias: torch.Tensor | None) -> row_classes.Product:
    """`torch.nn.functional.linear` as a function of its rows; of the packed weight where there is one."""
    if pack is None:
        return functools.partial(torch.nn.functional.linear, weight=weight, bias=bias)
    return functools.partial(ops.onednn_mm, pack, bias=bias)


_vllms = utils.dispatch_cpu_unquantized_gemm
_numbers = itertools.count()
_linears: "weakref.WeakValueDictionary[int, CpuLinear]" = weakref.WeakValueDictionary()


@functools.cache
def _define_operator() -> torch.library.Library:
    """`torch.ops.sam.cpu_linear`, which torch.compile leaves as it is: padding and packing happen when it runs."""
    library = torch.library.Library("sam", "FRAGMENT")
    library.define("cpu_linear(Tensor x, Tensor weight, Tensor? bias, Tensor key) -> Tensor")
    library.impl("cpu_linear", lambda x, weight, bias, key: _linears[int(key)].multiply(x, weight, bias), "CPU")
    only_shape = lambda x, weight, bias, key: x.new_empty((*x.shape[:-1], weight.shape[0]))  # noqa: E731
    torch.library.register_fake("sam::cpu_linear", only_shape, lib=library)
    return library
