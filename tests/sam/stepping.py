"""An engine's step of a drafter."""


def step(drafter, request_ids, token_ids, offsets, budgets, min_acceptance=0.0):
    """Append each request's new tokens, then draft for all."""
    drafter.append(request_ids, token_ids, offsets)
    return drafter.draft(request_ids, budgets, min_acceptance)
