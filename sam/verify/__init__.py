"""Which drafts stand and which token follows: vectorised, on any device, without changing the distribution.

Two rules. Exact match: draw every position from the target distribution with its own uniform and keep drafts while
they equal the draw; for one-hot drafts this accepts with the same probability as rejection sampling, needs no
residual distribution, and makes the tokens a function of (key, position, logits). Standard: rejection sampling as in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
"""

from sam.verify.exact import GREEDY, PLACEHOLDER, accept_matching, check_inputs, sample_inverse_cdf, without_mass
from sam.verify.rejection import (
    expand_batch_to_tokens,
    rejection_greedy_sample,
    rejection_random_sample,
    rejection_sample,
    sample_recovered_tokens,
)

__all__ = [
    "GREEDY",
    "PLACEHOLDER",
    "accept_matching",
    "check_inputs",
    "expand_batch_to_tokens",
    "rejection_greedy_sample",
    "rejection_random_sample",
    "rejection_sample",
    "sample_inverse_cdf",
    "sample_recovered_tokens",
    "without_mass",
]
