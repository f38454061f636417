"""Token ids as callers give them, as kernels take them."""

import hashlib

import numpy as np

DIGEST_BYTES = 16


def digest(tokens: np.ndarray) -> bytes:
    """The DIGEST_BYTES by which a text is known in all processes and files: blake2b of its token ids as int32."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32), digest_size=DIGEST_BYTES).digest()


def check_token_ids(token_ids: np.ndarray, name: str) -> np.ndarray:
    """`token_ids` as int32 [length]; an error begins with `name`.

    Raises:
        ValueError: not a list of integers from 0 to 2**31 - 1.
    """
    tokens = np.asarray(token_ids)
    if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise ValueError(f"{name}: expected token ids from 0 to 2**31 - 1, got {tokens.dtype} {tokens[:8]}")
    return np.ascontiguousarray(tokens, dtype=np.int32).ravel()
