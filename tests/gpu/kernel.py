"""The kernel that drafts, on a real GPU: its drafts beside the host's, and its microseconds.

`python3 -m tests.gpu.kernel RECORDING... [--share 0.2] [--requests 1 16 64 256]`, in the project's folder. Where there
is no GPU the drafts are those of Triton's interpreter, and nothing is timed.
"""

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from sam.drafting.drafter import Drafter
from sam.record.responses import Recording, read_recording
from sam.vllm.v2 import device_walk
from sam.vllm.v2.device_speculator import read_by_device
from tests.sam.vllm.walks import VOCABULARY, K, compare, interpreted, requests_of

GPU = torch.device("cuda")
LAUNCHES = 200
FLUSHED_BYTES = 256 << 20  # written before each launch, as a forward pass leaves nothing of the automaton in the cache
MEMORY_BYTES = 256 << 20


def on_gpu(tensors: tuple) -> tuple:
    """The same named tuple, its tensors copied to the GPU."""
    return type(tensors)(*(value.to(GPU) if isinstance(value, torch.Tensor) else value for value in tensors))


def draft_on_gpu(automaton, requests, k: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """As device_walk.draft, of the host's arrays, with drafts on the host."""
    return tuple(out.cpu() for out in device_walk.draft(on_gpu(automaton), on_gpu(requests), k, vocabulary))


def kernel() -> contextlib.AbstractContextManager:
    """The GPU's, or where there is none Triton's interpreter."""
    if not torch.cuda.is_available():
        return interpreted()
    return contextlib.nullcontext(SimpleNamespace(automaton_of=device_walk.automaton_of, draft=draft_on_gpu))


def followed(recording: Recording, count: int) -> tuple[Drafter, device_walk.Requests]:
    """A drafter of `count` requests, each a token behind its text, which ends somewhere in a recorded response."""
    rng = np.random.default_rng(0)
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=MEMORY_BYTES)
    prompts = [prompt for prompt, group in zip(recording.prompts, recording.responses, strict=True) for _ in group]
    responses = [response for group in recording.responses for response in group]
    names = [str(number) for number in range(count)]
    texts = []
    for number, name in enumerate(names):
        which = number % len(responses)
        response = responses[which]
        known = response[: int(rng.integers(1, len(response) + 1))]
        prompt = np.asarray(prompts[which], np.int32)
        drafter.start(name, prompt)
        drafter.append([name], np.asarray(known[:-1], np.int32), np.array([0, len(known) - 1]))
        texts.append([*prompt.tolist(), *np.asarray(known).tolist()])
    return drafter, requests_of(drafter, texts, names, rng)


def microseconds(launch: Callable[[], object]) -> list[float]:
    """Of each launch, as the GPU's clock has it; the first ones are left out."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=GPU)
    taken = []
    for _ in range(LAUNCHES):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        flushed.zero_()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return taken[LAUNCHES // 10 :]


def time_launches(path: Path, counts: list[int]) -> None:
    """Print the median and the range, from the device's own memory and through the bus."""
    for count in counts:
        drafter, requests = followed(read_recording(path), count)
        own = device_walk.automaton_of(drafter)
        read = {name: read_by_device(getattr(own, name), GPU) for name in ("nodes", "buckets", "rows")}
        given = on_gpu(requests)
        copied = on_gpu(own)
        places = {"device memory": copied, "through the bus": copied._replace(**read)}
        for place, automaton in places.items():
            taken = microseconds(lambda: device_walk.draft(automaton, given, K, VOCABULARY))  # noqa: B023
            median = statistics.median(taken)
            print(f"{count} requests, {place}: {median:.0f} us ({min(taken):.0f} to {max(taken):.0f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--share", type=float, default=0.2, help="of the steps that are compared")
    parser.add_argument("--tokens", type=int, default=20_000, help="of a recording, in each lateness")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if has_gpu else "no GPU: Triton's interpreter", flush=True)
    if has_gpu:
        time_launches(options.recordings[0], options.requests)
    for path in options.recordings:
        for late in range(4):
            beside = functools.partial(compare, share=options.share, first=options.tokens, kernel=kernel)
            counts = beside(read_recording(path), lambda: late)  # noqa: B023
            print(f"{path.name}, {late} late: {counts['drafts']} drafts, {counts['different']} different", flush=True)


if __name__ == "__main__":
    main()
