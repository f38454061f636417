"""What can go wrong between an engine and its drafter: each of FAULTS puts one fault into a proposer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from sam.drafting.texts import Drafts


def _change_drafts(change: Callable[[Drafts], Drafts], proposer) -> None:
    draft = proposer.drafter.draft
    proposer.drafter.draft = lambda *arguments: change(draft(*arguments))


CHANGES = {
    "drafting_raises": lambda drafts: 1 / 0,
    "drafts_have_another_shape": lambda drafts: replace(drafts, token_ids=np.stack([drafts.token_ids] * 2, axis=1)),
    "drafts_are_no_tokens": lambda drafts: replace(drafts, token_ids=-1 - drafts.token_ids),
}
FAULTS = {name: partial(_change_drafts, change) for name, change in CHANGES.items()}


def mend(proposer) -> None:
    """Take out whichever fault is in it."""
    vars(proposer.drafter).pop("draft", None)
