"""Verification: which drafts are accepted and which token follows, on any device, without changing the distribution.

Exact match draws every position from the target distribution with its own uniform, and accepts drafts while they equal
the draw: with the probability of rejection sampling for one-hot drafts, and tokens that are a function of (key,
position, logits). Rejection sampling takes drafts with probabilities too.
"""

from sam.verify.exact import GREEDY, PLACEHOLDER, accept_matching, follow_paths, sample_inverse_cdf
from sam.verify.rejection import expand_batch_to_tokens, rejection_sample

__all__ = [
    "GREEDY",
    "PLACEHOLDER",
    "accept_matching",
    "expand_batch_to_tokens",
    "follow_paths",
    "rejection_sample",
    "sample_inverse_cdf",
]
