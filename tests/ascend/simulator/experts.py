"""The operators that a mixture of experts calls with all-gather communication, in float32 on the CPU."""

from __future__ import annotations

import torch

from simulator.linear import batch_invariant_linear

SOFTMAX = 0


def moe_gating_top_k(x, *, k, renorm, norm_type, eps=1e-20, routed_scaling_factor=1.0, bias_opt=None, **_):
    """Weights [tokens, k] of the k likeliest experts and their ids. Groups of experts are not simulated."""
    scores = x.float().softmax(-1) if norm_type == SOFTMAX else x.float().sigmoid()
    chosen = (scores if bias_opt is None else scores + bias_opt).topk(k, -1).indices
    weights = scores.gather(1, chosen)
    if renorm or norm_type != SOFTMAX:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.to(torch.int32), scores


def npu_moe_init_routing_custom(hidden_states, topk_ids, *, scale=None, active_expert_range, **_):
    """Rows sorted by expert, those of other ranks' experts last; where each row went; rows of each own expert."""
    first, end = active_expert_range
    experts = topk_ids.flatten().long()
    own = (experts >= first) & (experts < end)
    order = torch.where(own, experts, end).argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    counts = torch.bincount(experts[own] - first, minlength=end - first)
    return hidden_states[order // topk_ids.shape[1]], position.to(torch.int32), counts, None


def npu_grouped_matmul(x, weight, *, bias=None, group_list=None, **_):
    """Rows of each group times its matrix, [groups, in, out]; rows of no group stay zero."""
    (rows,), (matrices,) = x, weight
    output = rows.new_zeros(len(rows), matrices.shape[2])
    start = 0
    for group, count in enumerate(group_list.tolist()):
        part = rows[start : start + count]
        if count:
            own_bias = bias[0][group] if bias is not None else None
            output[start : start + count] = batch_invariant_linear(part, matrices[group].T, own_bias)
        start += count
    return [output]


def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs):
    """Weighted sums of each token's rows: [tokens, hidden]."""
    tokens, k = probs.shape
    rows = permuted_tokens[sorted_indices.long()].view(tokens, k, -1)
    return (rows * probs[:, :, None].to(rows.dtype)).sum(1)


def _torch_npu():
    import torch_npu

    return torch_npu


def _own_kernels():
    return torch.ops._C_ascend  # vllm-ascend's, not built here


OPERATORS = (
    (_own_kernels, moe_gating_top_k),
    (_own_kernels, npu_moe_init_routing_custom),
    (_torch_npu, npu_grouped_matmul),
    (_torch_npu, npu_moe_token_unpermute),
)


def install() -> None:
    for namespace, function in OPERATORS:
        setattr(namespace(), function.__name__, function)
