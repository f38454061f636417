"""A paired test without assumptions about the distribution."""

import numpy as np

RESAMPLES = 10_000


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Two-sided permutation test that the mean of paired differences, float [pairs], is zero; 1.0 where all are.

    Under the hypothesis each difference is as likely with the other sign (Fisher's randomisation test). The smallest
    value that n pairs can give is about 2 / 2**n.
    """
    if not differences.any():
        return 1.0
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (RESAMPLES, len(differences)))
    extreme = np.abs((signs * differences).mean(1)) >= abs(differences.mean()) - 1e-12
    return float((1 + extreme.sum()) / (1 + RESAMPLES))
