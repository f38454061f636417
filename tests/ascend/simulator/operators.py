"""torch-npu's fused operators that a Qwen3 calls, in float32 on the CPU, under the real operators' schemas."""

from __future__ import annotations

import inspect

import torch

from tests.ascend.simulator import launches


def npu_format_cast(tensor, _format):
    return tensor


def npu_rms_norm(x, gamma, epsilon=1e-6):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    total = x1 + x2
    normed, scale = npu_rms_norm(total, gamma, epsilon)
    return normed, scale, total


def npu_swiglu(x, dim=-1):
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate.float()).to(x.dtype) * up


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    used = slot_indices >= 0
    slots = slot_indices[used].long()
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = new[: len(slot_indices)][used].to(cache.dtype)


def _attend(query, key, value, scale, causal):
    """query: [length, heads, size]; key and value: [context, key heads, size]. One query row at a time.

    The hardware kernel's rows do not depend on how many there are either; matrix products on a CPU would.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(groups, 1)
    value = value.float().repeat_interleave(groups, 1)
    rows = []
    for row in range(len(query)):
        seen = len(key) - len(query) + row + 1 if causal else len(key)
        scores = (query[row].float() * key[:seen]).sum(-1) * scale
        rows.append((scores.softmax(0)[:, :, None] * value[:seen]).sum(0))
    return torch.stack(rows).to(query.dtype)


def npu_fused_infer_attention_score(
    query, key, value, *, block_table=None, input_layout="TND", block_size=128, actual_seq_lengths=None,
    actual_seq_lengths_kv=None, num_key_value_heads=None, scale=1.0, sparse_mode=0,
):  # fmt: skip
    assert input_layout == "TND" and sparse_mode in (0, 3), (input_layout, sparse_mode)  # no window, no tree
    # The operator's own condition on this layout.
    assert len(query) == actual_seq_lengths[-1], (len(query), actual_seq_lengths)
    output = torch.zeros_like(query)
    start = context_start = 0
    for index, end in enumerate(actual_seq_lengths):
        if block_table is None:
            context_end = actual_seq_lengths_kv[index]
            keys, values = key[context_start:context_end], value[context_start:context_end]
            context_start = context_end
        else:
            length = int(actual_seq_lengths_kv[index])
            blocks = block_table[index, : -(-length // block_size)].long()
            shape = (-1, num_key_value_heads, query.shape[-1])
            keys, values = (cache[blocks].reshape(shape)[:length] for cache in (key, value))
        if end > start and len(keys):
            output[start:end] = _attend(query[start:end], keys, values, scale, sparse_mode == 3)
        start = end
    return output, torch.empty(1)


def npu_top_k_top_p(logits, p=None, k=None):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits.clone(), k, p)


def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert is_neox, "interleaved halves"
    cos, sin = (half[:, None] for half in cos_sin_cache[positions.long()].float().chunk(2, -1))
    for tensor in (query, key):
        rotated = tensor.view(positions.numel(), -1, head_size)[..., : 2 * cos.shape[-1]]
        a, b = rotated.float().chunk(2, -1)
        rotated.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(tensor.dtype))


def _npu_matmul_add_fp32(*_):
    """Called once at start-up to load the library."""


OPERATORS = (
    npu_format_cast, npu_rms_norm, npu_add_rms_norm, npu_swiglu, _npu_reshape_and_cache,
    npu_fused_infer_attention_score, npu_top_k_top_p, _npu_rotary_embedding, _npu_matmul_add_fp32,
)  # fmt: skip


def _kernel(function):
    """`function` with the arguments that it knows; the real operator's others are hints."""
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]

    def kernel(*arguments, **keywords):
        known = {name: value for name, value in keywords.items() if name in parameters}
        with launches.inside(function.__name__):
            return function(*arguments[: len(positional)], **known)

    kernel.__name__ = function.__name__
    return kernel


_libraries = {}  # registrations end with their library object


def install() -> None:
    import torch_npu
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    _register_atb_extensions()
    for namespace in ("npu", "atb"):
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    for function in OPERATORS:
        name, kernel = function.__name__, _kernel(function)
        namespace = "npu" if hasattr(torch.ops.npu, name) else "atb"
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None and "default" in packet.overloads():
            _libraries[namespace].impl(name, kernel, "CPU")
        else:
            setattr(torch_npu, name, kernel)
