"""Exact-match verification: one draw per position by inverse CDF; drafts are accepted while they equal the draw.

The draw takes one uniform per (request key, position in its text): counter-based, so nothing is shared and nothing is
stored. With several paths of a request the text follows whichever agrees with it.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch

from sam.jit import compiled, compiled_sum

PLACEHOLDER = -1  # vLLM's mark for "no token here"
GREEDY = 0.0  # the temperature that means argmax

SMALL_VOCABULARY = 1 << 14  # tokens up to which a compiled loop on the host takes a fifth of torch's time
# Tokens per block of the two-level search: about the square root of a vocabulary of 150,000.
BLOCK = 512
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
    """float64 [n], uniforms in [2**-53, 1 - 2**-53].

    Args:
        rng_keys: int64 [n], not negative (`rng_key`).
        positions: int64 [n], of a token the number of tokens before it, the prompt's included.
        stream: of which two never share a value: every kind of decision takes its own.
    """
    values = np.empty(len(rng_keys))
    for i in range(len(rng_keys)):
        z = _mix(np.uint64(rng_keys[i]) + _GOLDEN * np.uint64(stream + 1))
        z = _mix(z + _GOLDEN * (np.uint64(positions[i]) + np.uint64(1)))
        # 52 bits and a half: with 53 the largest would round to 1.0, and the last token be drawn whatever its mass.
        values[i] = (np.float64(z >> np.uint64(12)) + 0.5) * 2.0**-52
    return values


def sent(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the host's memory, or an array, on `device`; from memory that is not pinned PyTorch would wait."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def sample_inverse_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: float32 [num_tokens, vocabulary], temperature and masks applied.
        uniforms: float64 [num_tokens], in (0, 1), independent of each other.

    Returns:
        int64 [num_tokens]. A token of probability zero is never drawn. A logits row without mass (a NaN, or every
        token masked) gives token 0, as in vLLM, whose sampler takes the first of a row of NaN.

    One float32 sum over all tokens has steps of 6e-8 near its end: a token of probability 1e-8 there is never drawn,
    or takes its neighbour's share. So a block of tokens is chosen first, by a float64 sum of the blocks' float32 sums,
    then a token in it: every token keeps the relative precision of its float32 probability.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    vocabulary = probabilities.shape[1]
    if vocabulary <= SMALL_VOCABULARY and probabilities.device.type == "cpu":
        tokens = np.zeros(len(logits), dtype=np.int64)
        _draw(probabilities.detach().numpy(), uniforms.numpy(), tokens)
        return torch.from_numpy(tokens)
    whole = vocabulary // BLOCK
    sums = probabilities[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).sum(-1)
    if whole * BLOCK < vocabulary:
        sums = torch.cat((sums, probabilities[:, whole * BLOCK :].sum(-1, keepdim=True)), dim=1)
    outer = sums.to(torch.float64).cumsum(-1)
    targets = uniforms * outer[:, -1]
    block = _search(outer, targets).unsqueeze(1)
    size = sums.gather(1, block).to(torch.float64)
    fraction = (targets.unsqueeze(1) - (outer.gather(1, block) - size)) / size

    columns = block * BLOCK + torch.arange(min(BLOCK, vocabulary), device=probabilities.device)
    inside = probabilities.gather(1, columns.clamp(max=vocabulary - 1)).to(torch.float64)
    inner = inside.masked_fill_(columns >= vocabulary, 0.0).cumsum(-1)
    # The fraction may round to 1 or to -1e-16; the draw must stay among the block's tokens that have mass.
    targets = fraction.squeeze(1).clamp(0.0, 1.0 - 2.0**-52) * inner[:, -1]
    tokens = (block.squeeze(1) * BLOCK + _search(inner, targets)).clamp_(max=vocabulary - 1)
    return torch.where(outer[:, -1] > 0, tokens, 0)


@compiled_sum
def _draw(probabilities, uniforms, tokens):
    """Fill `tokens` (int64 [rows], 0 before, which a row without mass keeps) by sums of float64."""
    for row in range(len(tokens)):
        mass = 0.0
        for probability in probabilities[row]:
            mass += np.float64(probability)
        # Rounding may leave more than the row has: the last token with mass is drawn then.
        left = uniforms[row] * mass
        for token in range(probabilities.shape[1]):
            probability = np.float64(probabilities[row, token])
            if probability > 0.0:
                tokens[row] = token
                if left < probability:
                    break
                left -= probability


def _search(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds the target, within bounds also for a row of NaN."""
    index = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return index.clamp_(max=cumulative.shape[1] - 1)


def accept_matching(sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """int32 [requests, 1 + k], each request's tokens up to the first that differs from its draft; then PLACEHOLDER.

    Args:
        sampled: int64 [requests, 1 + k], the token drawn at each position; PLACEHOLDER after a request's bonus token.
        drafts: int64 [requests, 1 + k], aligned with it; a value that no token has where there is no draft.
    """
    matched = (sampled == drafts).to(torch.int8).cumprod(1).bool()
    kept = torch.ones_like(matched)
    kept[:, 1:] = matched[:, :-1]
    return torch.where(kept, sampled, PLACEHOLDER).to(torch.int32)


class Followed(NamedTuple):
    """What comes of requests with several paths."""

    tokens: torch.Tensor  # int32 [requests, 1 + k], PLACEHOLDER after the last
    rows: torch.Tensor  # int64 [requests, 1 + k], the row that each token was drawn in; any row after the last token
    last: torch.Tensor  # int64 [requests], place among the request's rows of the one that all accepted drafts are in


def follow_paths(sampled: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> Followed:
    """Go from token to token, along the rows whose drafts agree with all tokens so far.

    A position's token is taken from the first row that agrees, which the tokens before it decide alone: the tokens are
    those that one row with the right drafts would give, whatever the paths are.

    Args:
        sampled: int64 [n, 1 + k], the token drawn in each row of a batch at each position, all rows of a request with
            the same uniform; PLACEHOLDER after a row's bonus token.
        drafts: int64 [n, 1 + k], aligned with it; a value that no token has where there is no draft.
        rows: int64 [requests, paths], of each request, its own first; -1 where there are fewer.
    """
    agrees = rows >= 0
    index = rows.clamp(min=0)
    drawn = sampled[index]
    drafted = drafts[index]
    requests = torch.arange(len(rows), device=rows.device)
    # Of equal values argmax need not give the first.
    order = torch.arange(rows.shape[1], 0, -1, device=rows.device)
    tokens = []
    taken = []
    last = torch.zeros_like(requests)
    for position in range(sampled.shape[1]):
        goes_on = agrees.any(1)
        first = (agrees * order).argmax(1)
        token = drawn[requests, first, position]
        tokens.append(torch.where(goes_on, token, PLACEHOLDER))
        taken.append(index[requests, first])
        last = torch.where(goes_on, first, last)
        agrees = agrees & (drafted[:, :, position] == token[:, None])
    return Followed(torch.stack(tokens, 1).to(torch.int32), torch.stack(taken, 1), last)
