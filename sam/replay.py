"""`python -m sam.replay --traces FILES --drafter sam --scope group --k 3`: what a drafter would have gained.

Replays recorded responses in lock-step: all samples of a prompt start together, and in every round each of them
drafts, has its draft compared with what was really sampled, and advances by the accepted tokens and the bonus
token. A drafter sees a sample's prompt and tokens and what the other samples have had accepted so far. Within a round
the samples take turns (`--order turns`), so that the second knows what the first has just had accepted; an engine
drafts for all of them at once (`--order engine`), which gives a little less where many samples share a drafter.
Prints one JSON object for each file and drafter, or a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.drafter import Drafts
from sam.peers import make_drafter
from sam.traces import Recording, TraceError, read_recording

POSITION_BIN = 512  # tokens of a response per point of the acceptance-by-position table


@dataclass
class Replay:
    """Counts of one replay; times are in seconds."""

    draft_length: int
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    accepted_at: np.ndarray = field(init=False)
    drafted_at: np.ndarray = field(init=False)
    by_position: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_at = np.zeros(self.draft_length, dtype=np.int64)
        self.drafted_at = np.zeros(self.draft_length, dtype=np.int64)

    def count(self, position: int, drafted: int, accepted: int, advanced: int) -> None:
        """One verify step of one sample, which had `position` tokens before it."""
        self.steps += 1
        self.tokens += advanced
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_at[:drafted] += 1
        self.accepted_at[:accepted] += 1
        sums = self.by_position.setdefault(position // POSITION_BIN, [0, 0])
        sums[0] += advanced
        sums[1] += 1

    def summary(self) -> dict:
        """The figures that are printed; acceptance length counts the bonus token, 1.0 is no gain."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "acceptance_rate": round(self.accepted / max(1, self.drafted), 4),
            "acceptance_per_position": [
                round(a / max(1, d), 4) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)
            ],
            "draft_us_per_token": round(1e6 * self.seconds / max(1, self.tokens), 3),
            "bytes_per_token": round(self.peak_bytes / max(1, self.tokens), 1),
        }

    def positions(self) -> list[tuple[int, float]]:
        """(first response position of the bin, mean acceptance length in it)."""
        return [(b * POSITION_BIN, tokens / steps) for b, (tokens, steps) in sorted(self.by_position.items())]


ORDERS = ("turns", "engine")


def replay(
    recording: Recording, make, draft_length: int, samples: int | None = None, order: str = "turns", progress=None
) -> Replay:
    """Replay all prompts, one after the other.

    Args:
        recording: prompts with their responses.
        make: makes a drafter (start, step, finish as sam.drafter.Drafter); one for all, or with `samples` one each.
        draft_length: tokens drafted for each sample and step.
        samples: of a prompt that share a drafter, as on a replica; the others get their own. None: all.
        order: turns or engine, see above.
        progress: called with the tokens advanced since the last call.
    """
    result = Replay(draft_length)
    drafter = make()
    for index, (prompt, responses) in enumerate(zip(recording.prompts, recording.responses, strict=True)):
        size = samples or len(responses)
        for first in range(0, len(responses), size):
            if samples:
                drafter = make()
            group = _Group(result, drafter, f"{index}/{first}", prompt, responses[first : first + size])
            group.play(order, progress)
    return result


class _Group:
    """The samples of one prompt that share a drafter."""

    def __init__(self, result: Replay, drafter, name: str, prompt: np.ndarray, responses: list[np.ndarray]):
        self.result, self.drafter, self.responses = result, drafter, responses
        self.ids = [f"{name}/{i}" for i in range(len(responses))]
        self.done = [0] * len(responses)
        self.new = [response[:0] for response in responses]
        started = time.perf_counter()
        for request_id in self.ids:
            drafter.start(request_id, prompt)
        result.seconds += time.perf_counter() - started

    def play(self, order: str, progress) -> None:
        live = [i for i, response in enumerate(self.responses) if len(response)]
        while live:
            before = self.result.tokens
            for batch in [live] if order == "engine" else [[i] for i in live]:
                self._verify(batch, self._step(batch, self.result.draft_length))
                if order == "turns":
                    self._step(batch, 0)  # the next sample sees these tokens
            if progress:
                progress(self.result.tokens - before)
            live = [i for i in live if self.done[i] < len(self.responses[i])]
        self.result.peak_bytes = max(self.result.peak_bytes, self.drafter.nbytes)
        for request_id in self.ids:
            self.drafter.finish(request_id)

    def _step(self, batch: list[int], budget: int) -> Drafts:
        pieces = [self.new[i] for i in batch]
        offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        tokens = np.concatenate(pieces).astype(np.int32, copy=False)
        budgets = np.full(len(batch), budget, dtype=np.int32)
        started = time.perf_counter()
        drafts = self.drafter.step([self.ids[i] for i in batch], tokens, offsets, budgets)
        self.result.seconds += time.perf_counter() - started
        for i in batch:
            self.new[i] = self.new[i][:0]
        return drafts

    def _verify(self, batch: list[int], drafts: Drafts) -> None:
        for row, i in enumerate(batch):
            draft = drafts.token_ids[drafts.offsets[row] : drafts.offsets[row + 1]]
            truth = self.responses[i][self.done[i] :]
            accepted = _matching(draft, truth)
            advanced = min(accepted + 1, len(truth))
            self.result.count(self.done[i], len(draft), accepted, advanced)
            self.new[i] = truth[:advanced]
            self.done[i] += advanced


def _matching(draft: np.ndarray, truth: np.ndarray) -> int:
    """Draft tokens accepted: the length of the common prefix."""
    length = min(len(draft), len(truth))
    different = np.flatnonzero(draft[:length] != truth[:length])
    return int(different[0]) if different.size else length


def run(options: argparse.Namespace) -> Iterator[dict]:
    for path in options.traces:
        recording = read_recording(path, options.tokenizer)
        for name in options.drafter:
            make = partial(make_drafter, name, options.scope, options.k)
            with tqdm(total=recording.num_tokens, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(recording, make, options.k, options.samples, options.order, bar.update)
            head = {"file": path.name, "drafter": name, "scope": options.scope, "k": options.k, "order": options.order}
            yield {**head, **result.summary(), "by_position": result.positions() if options.by_position else None}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or verl's .jsonl dumps")
    parser.add_argument("--drafter", nargs="+", default=["sam"], help="sam, first-occurrence, ngram, suffix")
    parser.add_argument("--scope", choices=("request", "group", "history"), default="group")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step (default 3)")
    parser.add_argument("--samples", type=int, help="samples of a prompt that share a drafter (default: all)")
    parser.add_argument("--order", choices=ORDERS, default="turns", help="within a round (default turns)")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
    parser.add_argument("--by-position", action="store_true", help="acceptance length over response position")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    if options.k < 1:
        parser.error(f"--k {options.k}: expected 1 or more")
    try:
        rows = list(run(options))
    except (TraceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(json.dumps(row) for row in rows) if options.json else table(rows))
    return 0


def table(rows: list[dict]) -> str:
    """The figures side by side, one line for each file and drafter."""
    lines = [f"{'file':28} {'drafter':18} {'k':>2} {'length':>7} {'rate':>6} {'us/token':>9} {'bytes/token':>12}"]
    for row in rows:
        lines.append(
            f"{row['file'][:28]:28} {row['drafter']:18} {row['k']:>2} {row['mean_acceptance_length']:7.3f} "
            f"{row['acceptance_rate']:6.3f} {row['draft_us_per_token']:9.2f} {row['bytes_per_token']:12.1f}"
        )
        for position, length in row["by_position"] or ():
            lines.append(f"{'':28} from {position:>6} {length:7.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
