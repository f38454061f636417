"""How many of a trained drafter's tokens held-out responses have too, by their position in a draft."""

from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedModel

from recipe.draft_model.distil import Example, padded
from recipe.draft_model.eagle3 import Head, unrolled

POSITIONS = 8  # of a draft
Drafted = Callable[[torch.Tensor], list[torch.Tensor]]


def by_position(drafted: Drafted, examples: Iterable[Example], texts_at_once: int = 12) -> list[float]:
    """Share accepted at each position of a draft, of those accepted up to there; a draft begins before every token.

    A draft is accepted as far as it equals the response, so that the text before a draft token is the response's, and
    all drafts are read off whole texts.

    Args:
        drafted: of the token ids of texts, int64 [texts, tokens], for each position of a draft the greedy tokens, int64
            [texts, tokens]: the one at t was drafted after t, with so many draft tokens up to there.
    """
    accepted, tried = torch.zeros(POSITIONS), torch.zeros(POSITIONS)
    examples = list(examples)
    for begin in range(0, len(examples), texts_at_once):
        ids, before_response = padded(examples[begin : begin + texts_at_once])
        with torch.no_grad():
            found = drafted(ids)
        alive = before_response[:, :-1]  # by the token after which a draft begins
        for position, tokens in enumerate(found):
            alive = alive[:, : ids.shape[1] - 1 - position] & before_response[:, position:-1]
            tried[position] += alive.sum()
            alive = alive & (tokens[:, position:-1] == ids[:, position + 1 :])
            accepted[position] += alive.sum()
    return (accepted / tried.clamp(min=1)).tolist()


def of_draft_model(student: PreTrainedModel) -> Drafted:
    """A language model's token depends on the text alone, wherever in a draft it comes."""
    return lambda ids: [student(input_ids=ids, use_cache=False).logits.argmax(-1)] * POSITIONS


def of_head(target: PreTrainedModel, head: Head) -> Drafted:
    """A head's depends on where the draft began: each unrolled step is a position."""

    def drafted(ids: torch.Tensor) -> list[torch.Tensor]:
        passes, _ = unrolled(target, head, ids, POSITIONS)
        # The head has an entry for each token but the last, which predicts after the token behind it.
        return [torch.nn.functional.pad(logits.argmax(-1), (1, 0)) for logits in passes]

    return drafted
