"""Engine steps of a drafter."""

import numpy as np


def tokens(*values):
    return np.array(values, dtype=np.int32)


def append(drafter, new):
    """`new`: tokens by request."""
    offsets = np.cumsum([0, *map(len, new.values())])
    drafter.append(list(new), np.concatenate([tokens(), *new.values()]).astype(np.int32), offsets)


def step(drafter, new, budgets=3, min_acceptance=0.0):
    """Append each request's new tokens, then draft for all: Drafts."""
    append(drafter, new)
    return drafter.draft(list(new), np.zeros(len(new), np.int32) + budgets, min_acceptance)


def draft(drafter, request, *values, k=3):
    """The draft of one request with so many new tokens."""
    return step(drafter, {request: values}, k).token_ids.tolist()
