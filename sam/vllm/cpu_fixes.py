"""Repairs of vLLM 0.23.0's CPU backend that training needs: by sam.vllm.plugin, where speculation is configured.

The largest is of linear layers: weights that a weight sync can load, rows that do not depend on the batch.
Root cause: `dispatch_cpu_unquantized_gemm(layer, remove_weight=True)` in vllm/model_executor/layers/utils.py packs the
weight for oneDNN's kernel and puts an empty parameter in its place. Symptom: the second weight sync of a training run
fails with "Attempted to load weight ([128, 128]) into parameter ([0])". Here the packed copy lies beside the weight
and is made at the first use after a load. Second, the kernel's sums depend on the number of rows here and there: it is
called with numbers of rows that agree (sam.vllm.row_classes). Can go when vLLM's CPU backend supports reloading weights
and a batch-invariant mode.
"""

import functools
import itertools
import logging
import os
import sys
import weakref
from types import SimpleNamespace

import numba
import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase

from sam.config import SpeculationConfig
from sam.vllm import patches, row_classes
from sam.vllm.row_classes import RowClass

logger = logging.getLogger(__name__)

# More than ROUND_TO rows of layers with fewer weights are padded to multiples of it. For every shape and number of rows
# that is new, oneDNN compiles a kernel for 0.15 to 0.6 ms, which such a layer does not earn back: with all numbers of
# rows that a rollout of the tiny model has, the layers take twice as long (7aeeb4c:docs/experiments/cpu_linear.md).
SMALL_WEIGHTS = 100_000
ROUND_TO = 8
# Whether the weight is packed. The choice must not depend on times: the two kernels round differently, and all runs
# that are compared must choose alike.
PREFERENCE = (True, False)
# As vLLM's own; the library shares what it compiles for a number of rows among layers of one shape.
KERNELS_KEPT = 32
# torch's own kernel gets so many rows even where fewer agree: threads can change after the comparison, and the numbers
# that agree with them: on an AMD EPYC from 4 rows on with one thread, from 12 on with two.
LEAST_ROWS = 32
# Up to so many rows what they are padded with is kept.
SMALL_COUNT = 32
# Where no two numbers of rows agree.
LAST_RESORT = RowClass(32, 2048)
ANY_ROWS = RowClass(0, sys.maxsize)


def install(runner, config: SpeculationConfig) -> None:
    """Put into a model runner what does not have to be there before it is made."""
    pack_after_loads(runner)
    keep_unread_generators(runner)
    keep_threads(runner)
    if config.batch_invariant != "off":
        # Attention's sums do not depend on the batch. Root cause: vLLM's CPU attention divides a long context among
        # threads when the batch leaves some idle, and adds the parts up. Symptom: log-probabilities differ by some 1e-6
        # between batches, and about one response of 200 tokens in a thousand by a token. vLLM reads its own switch
        # after the model is loaded. Can go when it is off by default.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def install_rejection_sampler() -> None:
    """Replace the functions of vLLM's rejection sampler that do not work on a CPU, whatever verifies."""
    from vllm.v1.sample import rejection_sampler as vllms

    from sam.vllm import rejection_sampler

    rejection_sampler.install(vllms)


def copy_lora_indices() -> None:
    """Let LoRA's layers copy as vLLM's CPU worker does, whatever was imported first."""
    from vllm.lora.punica_wrapper import utils as of_lora
    from vllm.v1.worker.cpu.shm import async_tensor_h2d

    patches.put(of_lora, "async_tensor_h2d", "copy_lora_indices", async_tensor_h2d)


def keep_threads(runner) -> None:
    """Let vLLM's prompt lookup leave torch's number of threads as it is.

    Root cause: `NgramProposer.propose` lets numba start its threads, which sets OpenMP's number to all processors.
    Symptom: from then on matrix products are divided otherwise, and on a processor without AVX-512 log-probabilities
    differ by some 1e-6. Here they are started before. Can go when vLLM does that, or numba leaves the number alone.
    """
    if type(getattr(runner, "drafter", None)).__name__ == "NgramProposer":
        threads = torch.get_num_threads()
        numba.get_num_threads()  # starts them
        torch._C.set_num_threads(threads)  # vLLM has emptied the public one


def keep_unread_generators(runner) -> None:
    """Let seeded requests' prompts come in pieces."""

    def bookkeeping_sync(original, *args, **kwargs):
        if not (generators := runner.input_batch.generators):
            return original(*args, **kwargs)
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        kept = {int(row): generators.pop(int(row)) for row in unfinished if int(row) in generators}
        try:
            return original(*args, **kwargs)
        finally:
            generators.update(kept)

    patches.wrap(runner, "_bookkeeping_sync", "keep_unread_generators", bookkeeping_sync)


def install_linear_layers() -> None:
    """Let vLLM's linear layers on a CPU use `CpuLinear`."""
    _define_operator()
    patches.put(utils, "dispatch_cpu_unquantized_gemm", "multiply_invariantly", attach)


def attach(layer: torch.nn.Module, remove_weight: bool = False) -> None:
    """Give a layer its `cpu_linear`, which packs its weight again; not in another engine of this process, for which no
    speculation is configured.

    vLLM calls this after loading weights, verl after every weight sync too (process_weights_after_loading).
    """
    engine = get_current_vllm_config_or_none()
    if engine is not None and SpeculationConfig.from_vllm(engine) is None:
        _vllms(layer, remove_weight)
        return
    weight = layer.weight
    if weight.is_meta:  # a layer of another pipeline rank
        layer.cpu_linear = torch.nn.functional.linear
    elif weight.ndim == 2:  # not a convolution, which has a kernel of its own
        if not isinstance(present := getattr(layer, "cpu_linear", None), CpuLinear) or not present.fits(weight):
            present = layer.cpu_linear = CpuLinear(layer)
        present.forget()


def pack_after_loads(runner) -> None:
    """Pack all weights again after what loads them without `attach`: the model's own load_weights, reload_weights.

    What else writes weights does not on a CPU, in vLLM 0.23 and verl 0.9.1: vLLM's weight transfer needs NCCL or CUDA's
    IPC, verl's delta_sharded a later vLLM; sleeping is ignored; LoRA's weights lie beside those of the layers.
    """
    for owner, name in ((runner.model, "load_weights"), (runner, "reload_weights")):
        patches.wrap(owner, name, "pack_after_loads", _load_and_forget)
    for name in ("execute_model", "_dummy_run"):
        patches.wrap(runner, name, "pack_after_loads", _pack_and_run)


def _load_and_forget(load, *arguments, **keywords):
    try:
        return load(*arguments, **keywords)
    finally:
        for linear in list(_linears.values()):
            linear.forget()


def _pack_and_run(run, *arguments, **keywords):
    """Graphs read packed weights."""
    while _old:
        linear = _old.pop()
        if (layer := linear.layer()) is not None:
            linear.pack(layer.weight)
    return run(*arguments, **keywords)


class CpuLinear:
    """`torch.nn.functional.linear` of a layer, by one kernel and with numbers of rows that give equal bits.

    Raises:
        RuntimeError: there is no such kernel, and the engine's `speculation.batch_invariant` is on.
    """

    def __init__(self, layer: torch.nn.Module):
        weight, has_bias = layer.weight, getattr(layer, "bias", None) is not None
        engine = get_current_vllm_config_or_none()
        config = engine and SpeculationConfig.from_vllm(engine)
        mode = config.batch_invariant if config else "auto"
        self.shape, self.dtype, self.layer = tuple(weight.shape), weight.dtype, weakref.ref(layer)
        if mode == "off":
            self.packed, self.row_class = _can_pack(weight), ANY_ROWS
        else:
            self.packed, self.row_class = _kernel_and_row_class(self.shape, weight.dtype, has_bias, mode)
        self.multiple = ROUND_TO if self.packed and weight.numel() < SMALL_WEIGHTS and mode != "off" else 1
        # Graphs may call vLLM's kernel as vLLM does, on padded rows. Not layers of a vocabulary: an embedding is packed
        # only if it is used as a head too, which is outside of graphs.
        most = engine.scheduler_config.max_num_batched_tokens if engine else sys.maxsize
        is_whole = -(-most // self.multiple) * self.multiple <= self.row_class.largest
        self.is_direct = self.packed and is_whole and isinstance(layer, LinearBase)
        self._pack, self._is_old = None, True
        with torch.inference_mode(False):
            # Tensors, so that compiled graphs take them as inputs.
            self._address, self._key = torch.tensor(0), torch.tensor(next(_numbers))
        self._padding: dict[int, torch.Tensor] = {}  # of up to SMALL_COUNT rows
        if self.packed:
            self._onednn_mm = torch.ops._C.onednn_mm.default
            for count in range(1, min(SMALL_COUNT, self.row_class.largest) + 1):
                missing = row_classes.padded(count, self.row_class, self.multiple) - count
                self._padding[count] = torch.zeros(missing, self.shape[1], dtype=self.dtype) if missing else _NO_ROWS
        self._in_graphs = SimpleNamespace(n=self.shape[0], k=self.shape[1], handler_tensor=self._address)
        _linears[int(self._key)] = self

    def fits(self, weight: torch.Tensor) -> bool:
        return (tuple(weight.shape), weight.dtype) == (self.shape, self.dtype)

    def forget(self) -> None:
        """Pack again at the next use."""
        self._is_old = True
        if self.is_direct:
            _old.append(self)

    def pack(self, weight: torch.Tensor) -> None:
        self._pack, self._is_old = _pack(weight), False
        self._address.copy_(self._pack.handler_tensor)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.multiply(x, weight, bias)
        if self.is_direct:
            return self._multiply_in_graph(x, bias)
        return torch.ops.sam.cpu_linear(x, weight, bias, self._key)

    def _multiply_in_graph(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count, least = x.shape[0], self.row_class.smallest
        if least <= 1 and self.multiple == 1:
            return ops.onednn_mm(self._in_graphs, x, bias)
        # Graphs are traced as if there were two rows or more, and a maximum of two would be dropped.
        rows = torch.sym_max(-(-count // self.multiple) * self.multiple, max(least, 3))
        return ops.onednn_mm(self._in_graphs, torch.nn.functional.pad(x, (0, 0, 0, rows - count)), bias)[:count]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., inner], weight [columns, inner], bias [columns]; returns [..., columns]."""
        if self.packed and self._is_old:
            self.pack(weight)
        if x.dim() == 2 and (padding := self._padding.get(x.shape[0])) is not None and x.is_contiguous():
            # As below, and as ops.onednn_mm: a small layer would take half its time in their Python.
            rows = x if padding is _NO_ROWS else torch.cat((x, padding))
            result = rows.new_empty(rows.shape[0], self.shape[0])
            self._onednn_mm(result, rows, bias, self._address)
            return result if padding is _NO_ROWS else result[: x.shape[0]]
        rows = x.reshape(-1, self.shape[1]).contiguous()
        result = row_classes.multiply(_product(self._pack, weight, bias), rows, self.row_class, self.multiple)
        return result if x.dim() == 2 else result.reshape(*x.shape[:-1], self.shape[0])


def _kernel_and_row_class(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, mode: str
) -> tuple[bool, RowClass]:
    """Whether to use the packed kernel, and its numbers of rows.

    What rows are, to the bit, depends on shape, dtype and machine only: engines that are compared must agree.
    """
    for packed in PREFERENCE:
        name = f"{'packed' if packed else 'plain'} {dtype} {shape[0]}x{shape[1]}{' bias' if has_bias else ''}"
        row_class = row_classes.known_or_found(name, functools.partial(_compare, packed, shape, dtype, has_bias))
        if row_class is not None:
            # In MKL's strict mode products do not depend on threads (oneMKL's developer guide, "Reproducibility
            # Conditions"). MKL reads the variable before its first product.
            strict = not packed and dtype == torch.float32 and "STRICT" in os.environ.get("MKL_CBWR", "")
            least = 1 if packed or strict else LEAST_ROWS
            return packed, RowClass(max(least, row_class.smallest), row_class.largest)
    lacks = (
        f"a linear layer of {shape[0]} x {shape[1]} weights in {dtype} has no kernel here whose rows do not depend on"
    )
    if mode == "on":
        raise RuntimeError(f"speculation.batch_invariant=on: {lacks} the batch: set it to auto or off")
    logger.warning("%s the batch: tokens may differ between speculation on and off", lacks)
    return False, LAST_RESORT


def _compare(packed: bool, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> RowClass | None:
    """`row_classes.find_row_class` of a kernel with weights for it, with a bias too where the layer has one."""
    with torch.inference_mode():
        weight = row_classes.rounding_sensitive(*shape, dtype, seed=1, sign=-1)
        biases = [None, weight[:, 0] * 2.0**-24] if has_bias else [None]
        try:
            pack = _pack(weight) if packed else None
            return row_classes.find_row_class([_product(pack, weight, bias) for bias in biases], *shape, dtype)
        except RuntimeError as error:
            logger.warning("no packed kernel for weights %s in %s: %s", shape, dtype, error)
            return None


def _pack(weight: torch.Tensor):
    if not ops._supports_onednn:
        raise RuntimeError("vLLM was built without oneDNN")
    return ops.create_onednn_mm(weight.t(), KERNELS_KEPT)


def _can_pack(weight: torch.Tensor) -> bool:
    try:
        return _pack(weight[:64]) is not None  # as a whole it is packed at its first use
    except RuntimeError:
        return False


def _product(pack, weight: torch.Tensor, bias: torch.Tensor | None) -> row_classes.Product:
    """`torch.nn.functional.linear` as a function of its rows; of the packed weight where there is one."""
    if pack is None:
        return functools.partial(torch.nn.functional.linear, weight=weight, bias=bias)
    return functools.partial(ops.onednn_mm, pack, bias=bias)


_vllms = utils.dispatch_cpu_unquantized_gemm
_NO_ROWS = torch.empty(0)
_numbers = itertools.count()
_old: "list[CpuLinear]" = []  # to be packed before a graph runs
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
