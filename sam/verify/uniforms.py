"""One uniform per (request key, position in its text): counter-based, so nothing is shared and nothing is stored."""

import hashlib

import numpy as np

from sam.jit import compiled

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def rng_key(seed: int | None, engine_seed: int, request_id: str) -> int:
    """The key of a request's random numbers, in [0, 2**63), from its seed or, without one, the engine's and its id."""
    identity = f"seed/{seed}" if seed is not None else f"engine/{engine_seed}/{request_id}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") >> 1


@compiled
def _mix(z):
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def uniforms(rng_keys: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """Uniforms in [2**-53, 1 - 2**-53].

    Args:
        rng_keys: int64 [n], not negative (`rng_key`).
        positions: int64 [n], not negative: of a token, the number of tokens before it, the prompt's included.
        stream: int; two streams never share a value: every kind of decision takes its own.

    Returns:
        float64 [n].
    """
    values = np.empty(len(rng_keys))
    for i in range(len(rng_keys)):
        z = _mix(np.uint64(rng_keys[i]) + _GOLDEN * np.uint64(stream + 1))
        z = _mix(z + _GOLDEN * (np.uint64(positions[i]) + np.uint64(1)))
        # 52 bits and a half: with 53 the largest would round to 1.0, and the last token be drawn whatever its mass.
        values[i] = (np.float64(z >> np.uint64(12)) + 0.5) * 2.0**-52
    return values
