"""What can go wrong between an engine and its drafter: each function puts one fault into a proposer."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np


def drafting_raises(proposer) -> None:
    proposer.drafter.draft = None


def drafts_have_another_shape(proposer) -> None:
    _change_drafts(proposer, lambda token_ids: np.stack([token_ids] * 2, axis=1))


def drafts_are_no_tokens(proposer) -> None:
    _change_drafts(proposer, lambda token_ids: -1 - token_ids)


def the_copy_to_the_host_fails(proposer) -> None:
    _fail_to_wait(proposer, lambda is_needed: True)


def the_copy_of_verified_tokens_fails(proposer) -> None:
    _fail_to_wait(proposer, lambda is_needed: is_needed)


def _change_drafts(proposer, change: Callable[[np.ndarray], np.ndarray]) -> None:
    draft = proposer.drafter.draft

    def broken(*arguments):
        drafts = draft(*arguments)
        return replace(drafts, token_ids=change(drafts.token_ids))

    proposer.drafter.draft = broken


def _fail_to_wait(proposer, where: Callable[[bool], bool]) -> None:
    """The event of vLLM's copy raises; whether the copied tokens are needed decides `where`."""
    wait = proposer._wait

    def broken(step, output, is_needed):
        if where(is_needed):
            step.copied = SimpleNamespace(synchronize=None, query=step.copied.query)
        return wait(step, output, is_needed)

    proposer._wait = broken


def mend(proposer) -> None:
    """Take out whichever fault is in it."""
    vars(proposer).pop("_wait", None)
    vars(proposer.drafter).pop("draft", None)


FAULTS = {
    fault.__name__: fault
    for fault in (
        drafting_raises,
        drafts_have_another_shape,
        drafts_are_no_tokens,
        the_copy_to_the_host_fails,
        the_copy_of_verified_tokens_fails,
    )
}
