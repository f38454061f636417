"""`sam replay --traces FILES --drafter sam --scope group --k 3`: how drafters do on recorded responses.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token; one after the other, so that the second sample's
drafter has seen the first one's new tokens. With `--epochs` drafters remember earlier epochs with `--scope history`,
and are new in each otherwise.

With `--late 0 2` sam also drafts as where no step waits for the host: all samples of a prompt in a step, from what was
learnt 0 and 2 steps ago.

Cost is measured in a second pass, as an engine would pay it: up to 256 requests run at once, one call appends for all
of them and one drafts.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sam.command import Parser, laid_out, number, run_command
from sam.config import SCOPES, SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.late import LateDrafter
from sam.record.corpus import Text, read_corpus
from sam.record.responses import Recording, Spans, of_groups, read_recording
from sam.tools.peers import NAMES as PEERS
from sam.tools.peers import make_peer

NAMES = ("sam", *PEERS)
HISTORY_TOKENS = 4 << 20  # with scope=history, enough for any recording here
RUNNING_REQUESTS = 256
PROBABILITY_BINS = 10
HEADER = ("file", "drafter", "tokens", "given", "length", "rate", "calibration", "us/step", "us/token", "bytes/token")


def make_drafter(
    name: str,
    scope: str,
    draft_length: int,
    cross_prompt: bool = SpeculationConfig.cross_prompt,
    corpus: Sequence[Text] = (),
):
    """A drafter by its name, one of NAMES; ValueError: its package is not installed.

    Args:
        scope: request, group or history: whose tokens it drafts from.
        draft_length: draft tokens of a request at most.
        cross_prompt: whether sam remembers other prompts.
        corpus: what it reads first, if it can.
    """
    if name == "sam":
        drafter = Drafter(
            max_draft_tokens=draft_length, scope=scope, history_tokens=HISTORY_TOKENS, cross_prompt=cross_prompt
        )
        drafter.warm_up()
    else:
        try:
            drafter = make_peer(name, scope, draft_length)
        except ImportError as error:
            remedy = "install requirements/cpu.txt and requirements/peers.txt"
            raise ValueError(f"drafter {name}: {error}; {remedy}") from error
    if corpus and hasattr(drafter, "read_corpus"):
        drafter.read_corpus(corpus)
    return drafter


class RecordedRequest:
    """A recorded response that is generated, but for what was given to the model; `accepted`: its tokens so far."""

    def __init__(self, name: str, response: np.ndarray, given: Spans = ()):
        self.name = name
        self.response = response
        self.given = given
        self.accepted = 0

    def verify(self, draft: np.ndarray) -> tuple[int, int, np.ndarray]:
        """Accept the draft's correct tokens and the bonus token; returns how many of the draft, how many are generated,
        and the new tokens: those, and at a turn's end what is given behind it."""
        start = self.accepted
        whole = len(self.response)
        end, behind = next(((begin, end) for begin, end in self.given if begin > start), (whole, whole))
        left = self.response[start:end]
        length = min(len(draft), len(left))
        different = np.flatnonzero(draft[:length] != left[:length])
        accepted = int(different[0]) if different.size else length
        generated = min(accepted + 1, len(left))
        self.accepted = behind if start + generated == end else start + generated
        return accepted, generated, self.response[start : self.accepted]

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return self.accepted == len(self.response)


class Replay:
    """Verify steps of recorded responses, as an engine that speculates would have generated them, and their counts.

    Args:
        draft_length: draft tokens of a sample in a step.
        progress: called with the tokens advanced since the last call.
        in_step: the samples of a prompt do not take turns.

    Attributes:
        tokens, given, steps: generated tokens, those given to the model, and verify steps of a request.
        drafted, accepted: draft tokens, and those of them that were right.
        by_probability: float64 [10, 3], by tenth of a draft's probability: drafts, sum of probabilities, accepted.
        drafting, appending: seconds of this process's CPU time in the drafter's calls, whatever else the machine runs.
    """

    def __init__(self, draft_length: int, progress: Callable[[int], object] = lambda tokens: None, in_step=False):
        self.draft_length = draft_length
        self.progress = progress
        self.in_step = in_step
        self.tokens = self.given = self.steps = self.drafted = self.accepted = 0
        self.by_probability = np.zeros((PROBABILITY_BINS, 3))
        self.drafting = self.appending = 0.0

    def group(self, drafter, name: str, prompt, responses: list, given: list) -> None:
        """Replay samples of one prompt."""
        requests = []
        for i, (response, spans) in enumerate(zip(responses, given, strict=True)):
            if len(response):
                requests.append(RecordedRequest(f"{name}/{i}", response, spans))
        for request in requests:
            drafter.start(request.name, prompt)
        live = requests
        while live:
            for batch in [live] if self.in_step else [[request] for request in live]:
                self.step(drafter, batch)
            live = [request for request in live if not request.finished]
        for request in requests:
            drafter.finish(request.name)

    def step(self, drafter, batch: list[RecordedRequest]) -> None:
        """Draft for requests at once, verify, and show the drafter their new tokens."""
        names = [request.name for request in batch]
        budgets = np.full(len(batch), self.draft_length, dtype=np.int32)
        started = time.process_time()
        drafts = drafter.draft(names, budgets)
        self.drafting += time.process_time() - started
        pieces = []
        for row, request in enumerate(batch):
            part = slice(drafts.offsets[row], drafts.offsets[row + 1])
            accepted, generated, new = request.verify(drafts.token_ids[part])
            for i, probability in enumerate(drafts.acceptance[part].tolist()):
                place = min(PROBABILITY_BINS - 1, int(PROBABILITY_BINS * probability))
                self.by_probability[place] += (1, probability, i < accepted)
            self.steps += 1
            self.tokens += generated
            self.given += len(new) - generated
            self.drafted += part.stop - part.start
            self.accepted += accepted
            pieces.append(new)
        offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        new = np.concatenate(pieces)
        started = time.process_time()
        drafter.append(names, new, offsets)
        self.appending += time.process_time() - started
        self.progress(len(new))

    def summary(self) -> dict[str, float | None]:
        """The results; mean acceptance length counts the bonus token, 1.0 is no gain. The calibration error is of the
        worst tenth of the predicted probabilities."""
        errors = [abs(predicted - right) / count for count, predicted, right in self.by_probability if count]
        return {
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "acceptance_rate": round(self.accepted / max(1, self.drafted), 4),
            "calibration_error": round(max(errors), 4) if errors else None,
        }


def replay(recording: Recording, make, draft_length: int, epochs: str = "together", **how) -> Replay:
    """Replay all prompts, one after the other.

    Args:
        make: makes a drafter (start, append, draft, finish as sam.drafting.drafter.Drafter).
        epochs: together; or kept: epoch by epoch, the first one not counted; or forgotten: so, with a new drafter each
            time.
        how: further arguments of `Replay`.

    Raises:
        ValueError: the recording has fewer than two epochs, and they are not taken together.
    """
    result = Replay(draft_length, **how)
    parts = [recording] if epochs == "together" else recording.by_epoch()
    for epoch, part in enumerate(parts):
        if epoch == 0 or epochs == "forgotten":
            drafter = make()
        counts = Replay(draft_length, **how) if epoch == 0 and len(parts) > 1 else result
        for index, group in enumerate(part.groups()):
            counts.group(drafter, str(index), *group)
    return result


def measure_cost(recording: Recording, make, draft_length: int, **how) -> dict[str, float]:
    """Measure drafting with up to RUNNING_REQUESTS requests of all prompts at once.

    Returns:
        us_per_step: microseconds of a call to draft, per request.
        us_per_token: microseconds of appending and drafting, per generated token.
        bytes_per_token: memory of the drafter at its largest, per token that it holds.
    """
    drafter = make()
    result = Replay(draft_length, **how)
    samples = max(map(len, recording.responses))
    waiting = deque(
        (prompt, RecordedRequest(f"{index}/{i}", responses[i], given=given[i]))
        for i in range(samples)
        for index, (prompt, responses, given) in enumerate(recording.groups())
        if i < len(responses) and len(responses[i])
    )
    live: list[RecordedRequest] = []
    most_bytes = 0
    held = 1
    while live or waiting:
        while waiting and len(live) < RUNNING_REQUESTS:
            prompt, request = waiting.popleft()
            drafter.start(request.name, prompt)
            live.append(request)
        result.step(drafter, live)
        if drafter.nbytes > most_bytes:
            most_bytes = drafter.nbytes
            held = result.tokens + result.given + sum(map(len, recording.prompts))
        for request in live:
            if request.finished:
                drafter.finish(request.name)
        live = [request for request in live if not request.finished]
    return {
        "us_per_step": 1e6 * result.drafting / result.steps,
        "us_per_token": 1e6 * (result.drafting + result.appending) / result.tokens,
        "bytes_per_token": most_bytes / held,
    }


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Replay every file with every drafter; a row of figures for each, by the names of HEADER's columns in JSON.

    Raises:
        ValueError: one line, before anything is measured.
    """
    for name in options.drafter:
        make_drafter(name, options.scope, options.k)
    if "rest" in options.drafter and not (options.corpus or options.split):
        raise ValueError("drafter rest: it drafts from a corpus alone: add --corpus or --split")
    for path, corpus, recording in inputs_of(options):
        for name in options.drafter:
            make = partial(make_drafter, name, options.scope, options.k, corpus=corpus)
            with tqdm(total=2 * recording.num_tokens, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(recording, make, options.k, options.epochs, progress=bar.update)
                cost = measure_cost(recording, make, options.k, progress=bar.update)
            figures = result.summary() | cost
            if name != "sam":  # which alone predicts what is accepted
                figures["calibration_error"] = None
            yield {"file": path.name, "drafter": name, "tokens": result.tokens, "given": result.given, **figures}
        for late in options.late:
            yield late_row(recording, path, late, options, corpus)


def inputs_of(options: argparse.Namespace) -> list[tuple[Path, list[Text], Recording]]:
    """Read every file: its path, what is read before it, and what is replayed of it."""
    recordings = [(path, read_recording(path, options.tokenizer)) for path in options.traces]
    if options.split:
        return [(path, *split(recording, path)) for path, recording in recordings]
    corpus = read_corpus(options.corpus, HISTORY_TOKENS, options.tokenizer) if options.corpus else []
    return [(path, corpus, recording) for path, recording in recordings]


def late_row(recording: Recording, path: Path, late: int, options: argparse.Namespace, corpus: list) -> dict[str, Any]:
    """A row of sam that learns `late` steps late; its cost would be a device's."""

    def make():
        return LateDrafter(make_drafter("sam", options.scope, options.k, corpus=corpus), late)

    with tqdm(total=recording.num_tokens, unit="tok", desc=f"{path.stem} late {late}", mininterval=2.0) as bar:
        result = replay(recording, make, options.k, options.epochs, progress=bar.update, in_step=True)
    cost = dict.fromkeys(("us_per_step", "us_per_token", "bytes_per_token"))
    counts = {"tokens": result.tokens, "given": result.given}
    return {"file": path.name, "drafter": f"sam-late-{late}", **counts, **result.summary(), **cost}


def split(recording: Recording, source: Path) -> tuple[list[Text], Recording]:
    """Every other prompt's text as a corpus, and a recording of the other half."""
    if len(recording.prompts) < 2:
        raise ValueError(f"{source}: --split with {len(recording.prompts)} prompt: expected two or more")
    groups = list(recording.groups())
    corpus = [(prompt, response) for prompt, responses, _given in groups[::2] for response in responses]
    return corpus, of_groups(groups[1::2])


def as_text(rows: list[dict[str, Any]], is_table: bool) -> list[str]:
    """A line for each row; `is_table`: a line for each drafter and a column for each file, with the mean acceptance
    length and the microseconds of a call to draft."""
    if not is_table:
        return laid_out(HEADER, [list(map(cell, row.values())) for row in rows])
    files = list(dict.fromkeys(row["file"] for row in rows))
    drafters: dict[str, dict[str, str]] = {}
    for row in rows:
        cost = "-" if row["us_per_step"] is None else f"{row['us_per_step']:.1f}"
        by_file = drafters.setdefault(row["drafter"], {})
        by_file[row["file"]] = f"{row['mean_acceptance_length']:.3f} {cost:>7}"
    lines = [[name, *(by_file[file] for file in files)] for name, by_file in drafters.items()]
    return laid_out(["length, us/step", *files], lines)


def cell(value: str | float | None) -> str:
    """A value as the table has it."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def run(options: argparse.Namespace) -> list[str]:
    """What the command prints."""
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
        rows = list(rows_of(options))
    if options.json:
        result = {
            "k": options.k,
            "scope": options.scope,
            "epochs": options.epochs,
            "split": options.split,
            "late": options.late,
            "corpus": list(map(str, options.corpus)),
            "rows": rows,
        }
        return [json.dumps(result)]
    return as_text(rows, options.table)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="sam replay", description="How drafters do on recorded responses, without an engine.")
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or verl's .jsonl dumps")
    parser.add_argument("--drafter", nargs="+", default=["sam"], choices=NAMES)
    parser.add_argument("--scope", choices=SCOPES, default="group")
    parser.add_argument("--k", type=number(1), default=3, help="draft tokens per step (default 3)")
    parser.add_argument(
        "--late", nargs="+", default=[], type=number(0), help="sam, too, that learns so many steps late"
    )
    parser.add_argument("--epochs", action="store_true", help="epoch by epoch, the first one not counted")
    parser.add_argument("--corpus", nargs="+", type=Path, default=[], help="what sam, suffix and rest read beforehand")
    parser.add_argument("--split", action="store_true", help="every other prompt is the corpus, the rest is replayed")
    parser.add_argument("--tokenizer", help="for files of text: folder or name of the tokenizer")
    parser.add_argument("--table", action="store_true", help="a line for each drafter, a column for each recording")
    parser.add_argument("--json", action="store_true", help="print one object (docs/bench.md)")
    options = parser.parse_args(arguments)
    if not options.epochs:
        options.epochs = "together"
    else:
        options.epochs = "kept" if options.scope == "history" else "forgotten"
    if options.corpus and options.split:
        parser.error("--split makes the corpus: leave --corpus out")
    return options


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
