"""The operators that a mixture of experts calls with all-gather communication, in float32 on the CPU."""

from __future__ import annotations

import torch

SOFTMAX = 0


def moe_gating_top_k(x, *, k, renorm, norm_type, k_group=1, eps=1e-20, routed_scaling_factor=1.0, bias_opt=None, **_):
    """Weights [tokens, k] of the k likeliest experts and their ids."""
    assert (norm_type, k_group, bias_opt) == (SOFTMAX, 1, None), "sigmoids, groups of experts, biases"
    scores = x.float().softmax(-1)
    weights, chosen = scores.topk(k, -1)
    if renorm:
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
    assert bias is None
    output = rows.new_zeros(len(rows), matrices.shape[2])
    start = 0
    for matrix, count in zip(matrices, group_list.tolist(), strict=True):
        if count:
            output[start : start + count] = torch.nn.functional.linear(rows[start : start + count], matrix.T)
        start += count
    return [output]


def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs):
    """Weighted sums of each token's rows: [tokens, hidden]."""
    tokens, k = probs.shape
    rows = permuted_tokens[sorted_indices.long()].view(tokens, k, -1)
    return (rows * probs[:, :, None].to(rows.dtype)).sum(1)


FUSED = (npu_grouped_matmul, npu_moe_token_unpermute)  # torch-npu's
OWN_KERNELS = (moe_gating_top_k, npu_moe_init_routing_custom)  # vllm-ascend's, not built here
