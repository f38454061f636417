"""The cost of drafting, measured as an engine would pay it."""

import time

import numpy as np

from sam.record.responses import Recording
from sam.replay.round_robin import Request, append

RUNNING_REQUESTS = 256
PIECE = 512  # tokens


def measure_cost(recording: Recording, make, draft_length: int, progress=None) -> dict:
    """Measure drafting with up to RUNNING_REQUESTS requests of all prompts at once.

    Returns:
        draft_us_per_step: microseconds of a call to draft, per request.
        extend_ns_per_token: nanoseconds of appending in pieces of PIECE tokens, without drafting.
        us_per_token: microseconds of appending and drafting, per generated token.
        bytes_per_token: memory of the drafter at its largest, per token that it holds.
    """
    drafter = make()
    samples = max(len(responses) for responses in recording.responses)
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
        before = tokens
        for row, request in enumerate(live):
            tokens += request.verify(drafts.token_ids[drafts.offsets[row] : drafts.offsets[row + 1]])[1]
        appending += append(drafter, live)
        if drafter.nbytes > most_bytes:
            most_bytes, held = drafter.nbytes, tokens + sum(len(prompt) for prompt in recording.prompts)
        for request in live:
            if request.finished:
                drafter.finish(request.name)
        live = [request for request in live if not request.finished]
        if progress:
            progress(tokens - before)
    return {
        "draft_us_per_step": round(1e6 * drafting / steps, 3),
        "extend_ns_per_token": round(1e9 * _extending(recording, make) / tokens, 1),
        "us_per_token": round(1e6 * (drafting + appending) / tokens, 3),
        "bytes_per_token": round(most_bytes / held, 1),
    }


def _extending(recording: Recording, make) -> float:
    """Seconds to append all responses without drafting, `PIECE` tokens of each sample of a prompt at a time."""
    drafter, seconds = make(), 0.0
    for index, (prompt, responses) in enumerate(zip(recording.prompts, recording.responses, strict=True)):
        requests = [Request(f"{index}/{i}", response) for i, response in enumerate(responses) if len(response)]
        for request in requests:
            drafter.start(request.name, prompt)
        live = requests
        while live:
            for request in live:
                request.accepted = min(request.accepted + PIECE, len(request.response))
            seconds += append(drafter, live)
            live = [request for request in live if not request.finished]
        for request in requests:
            drafter.finish(request.name)
    return seconds
