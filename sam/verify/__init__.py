"""Verification: which drafts are accepted and which token follows, on any device, without changing the distribution.

Two rules. Exact match draws every position from the target distribution with its own uniform and accepts drafts while
they equal the draw: for one-hot drafts it accepts with the same probability as rejection sampling, needs no residual
distribution, and makes the tokens a function of (key, position, logits). Rejection sampling is that of Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
"""

from sam.verify.exact import GREEDY, PLACEHOLDER, accept_matching, accept_on_host, follow_paths, sample_inverse_cdf
from sam.verify.rejection import expand_batch_to_tokens, rejection_sample

__all__ = [
    "GREEDY",
    "PLACEHOLDER",
    "accept_matching",
    "accept_on_host",
    "expand_batch_to_tokens",
    "follow_paths",
    "rejection_sample",
    "sample_inverse_cdf",
]
