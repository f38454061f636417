"""What a draft model's passes drafted, and how it takes the place of sam's drafts."""

from dataclasses import dataclass

import numpy as np
import torch

from sam.drafting.drafts import Drafts
from sam.switch.draft_passes import Passes


@dataclass
class MadeDrafts:
    """What passes drafted, on the device.

    Attributes:
        plan: of those passes.
        names: the requests.
        lengths: int64 [requests], tokens of their texts.
        tokens: int64 [requests, passes].
        finite: bool [requests, passes], whether each came from finite logits.
        probabilities: float32 [requests, passes, vocabulary] that they were drawn from, where verification asks.
    """

    plan: Passes
    names: list[str]
    lengths: np.ndarray
    tokens: torch.Tensor
    finite: torch.Tensor
    probabilities: torch.Tensor | None = None


def replaced(proposed: Drafts, wanted, tokens: list[list[int]], room, expected) -> Drafts:
    """Sam's drafts, those of the `wanted` requests replaced by `tokens`, cut to the room that each has."""
    pieces, acceptance, replaced = [], [], iter(tokens)
    for i, own in enumerate(wanted):
        if own:
            draft = next(replaced)[: int(room[i])]
            pieces.append(np.array(draft, np.int32))
            acceptance.append(expected[i, : len(draft)].astype(np.float32))
        else:
            here = slice(proposed.offsets[i], proposed.offsets[i + 1])
            pieces.append(proposed.token_ids[here])
            acceptance.append(proposed.acceptance[here])
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return Drafts(np.concatenate(pieces), offsets, np.concatenate(acceptance), proposed.match_lengths)
