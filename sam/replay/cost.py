"""The cost of drafting, measured as an engine would pay it."""

import time

import numpy as np

from sam.record.responses import Recording
from sam.replay.round_robin import Request, append

RUNNING_REQUESTS = 256


def measure_cost(recording: Recording, make, draft_length: int, progress=None) -> dict:
    """Measure drafting with up to RUNNING_REQUESTS requests of all prompts at once.

    Returns:
        draft_us_per_step: microseconds of a call to draft, per request.
        us_per_token: microseconds of appending and drafting, per generated token.
        bytes_per_token: memory of the drafter at its largest, per token that it holds.
    """
    drafter, samples = make(), max(len(responses) for responses in recording.responses)
    waiting = [
        (prompt, Request(f"{index}/{i}", responses[i]))
        for i in range(samples)
        for index, (prompt, responses) in enumerate(zip(recording.prompts, recording.responses, strict=True))
        if i < len(responses) and len(responses[i])
    ][::-1]
    live: list[Request] = []
    tokens, steps, most_bytes, held, appending, drafting = 0, 0, 0, 1, 0.0, 0.0
    while live or waiting:
        while waiting and len(live) < RUNNING_REQUESTS:
            prompt, request = waiting.pop()
            drafter.start(request.name, prompt)
            live.append(request)
        names, budgets = [request.name for request in live], np.full(len(live), draft_length, dtype=np.int32)
        started = time.perf_counter()
        drafts = drafter.draft(names, budgets)
        drafting += time.perf_counter() - started
        steps += len(live)
        drafted = np.split(drafts.token_ids, drafts.offsets[1:-1])
        pieces = [request.verify(draft)[1] for request, draft in zip(live, drafted, strict=True)]
        appending += append(drafter, live, pieces)
        tokens += (new := sum(map(len, pieces)))
        if drafter.nbytes > most_bytes:
            most_bytes, held = drafter.nbytes, tokens + sum(map(len, recording.prompts))
        for request in live:
            if request.finished:
                drafter.finish(request.name)
        live = [request for request in live if not request.finished]
        if progress:
            progress(new)
    return {
        "draft_us_per_step": round(1e6 * drafting / steps, 3),
        "us_per_token": round(1e6 * (drafting + appending) / tokens, 3),
        "bytes_per_token": round(most_bytes / held, 1),
    }
