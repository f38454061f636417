"""What can go wrong between an engine and its drafter: each function puts one fault into a proposer."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np


def drafting_raises(proposer) -> None:
    proposer.drafter.draft = None


def drafts_have_another_shape(proposer) -> None:
    _change_drafts(proposer, lambda token_ids: np.stack([token_ids] * 2, axis=1))


def drafts_are_no_tokens(proposer) -> None:
    _change_drafts(proposer, lambda token_ids: -1 - token_ids)


def _change_drafts(proposer, change: Callable[[np.ndarray], np.ndarray]) -> None:
    draft = proposer.drafter.draft

    def broken(*arguments):
        drafts = draft(*arguments)
        return replace(drafts, token_ids=change(drafts.token_ids))

    proposer.drafter.draft = broken


def mend(proposer) -> None:
    """Take out whichever fault is in it."""
    vars(proposer.drafter).pop("draft", None)


FAULTS = {one.__name__: one for one in (drafting_raises, drafts_have_another_shape, drafts_are_no_tokens)}
