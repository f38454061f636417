"""Exact-match verification of several paths of a request: the text follows whichever path agrees with it."""

from typing import NamedTuple

import torch

from sam.verify.exact import PLACEHOLDER


class Followed(NamedTuple):
    """What comes of requests with several paths.

    Attributes:
        tokens: int32 [requests, 1 + k], PLACEHOLDER after the last.
        rows: int64 [requests, 1 + k], the row that each token was drawn in; any row after the last token.
        last: int64 [requests], place among the request's rows of the one that all accepted drafts are in.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    last: torch.Tensor


def follow_paths(sampled: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor) -> Followed:
    """Go from token to token, along the rows whose drafts agree with all tokens so far.

    Args:
        sampled: int64 [n, 1 + k], for each row of a batch the token drawn at each position, of the distribution after
            the row's drafts before it; PLACEHOLDER after a row's bonus token. All rows of a request draw a position's
            token with the same uniform.
        drafts: int64 [n, 1 + k], aligned with it; a value that no token has where there is no draft.
        rows: int64 [requests, paths], of each request, its own first; -1 where there are fewer.

    Each token is drawn once, from the distribution after the tokens before it: which row it is taken from is decided by
    those alone (the first that agrees with them), before it is looked at. So the tokens are those that one row with the
    right drafts would give, whatever the paths are.
    """
    agrees, index = rows >= 0, rows.clamp(min=0)
    drawn, drafted = sampled[index], drafts[index]
    requests = torch.arange(len(rows), device=rows.device)
    # Of equal values argmax need not give the first.
    order = torch.arange(rows.shape[1], 0, -1, device=rows.device)
    tokens, taken, last = [], [], torch.zeros_like(requests)
    for position in range(sampled.shape[1]):
        goes_on = agrees.any(1)
        first = (agrees * order).argmax(1)
        token = drawn[requests, first, position]
        tokens.append(torch.where(goes_on, token, PLACEHOLDER))
        taken.append(index[requests, first])
        last = torch.where(goes_on, first, last)
        agrees = agrees & (drafted[:, :, position] == token[:, None])
    return Followed(torch.stack(tokens, 1).to(torch.int32), torch.stack(taken, 1), last)
