"""`sam replay --traces FILES --drafter sam --scope group --k 3`: how drafters do on recorded responses.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token; one after the other, so that the second sample's
drafter has seen the first one's new tokens. With `--epochs` drafters remember earlier epochs with `--scope history`,
and are new in each otherwise.

Cost is measured in a second pass, as an engine would pay it: up to 256 requests run at once, one call appends for all
of them and one drafts, on one replica.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.command import Parser, laid_out, run_command
from sam.config import LOOKUP, SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.texts import Drafts
from sam.record.responses import Recording, Spans, read_recording

NAMES = ("sam", "first-occurrence", "ngram", "suffix")
HISTORY_TOKENS = 4 << 20  # with scope=history, enough for any recording here
RUNNING_REQUESTS = 256
PROBABILITY_BINS = 10
SETTINGS = ("scope", "k", "replicas", "delay", "epochs")  # that stand in every JSON object
# Columns of the table, and the row's key.
COLUMNS = {
    "file": "file", "drafter": "drafter", "k": "k", "length": "mean_acceptance_length", "rate": "acceptance_rate",
    "calibration": "calibration_error", "us/step": "draft_us_per_step", "us/token": "us_per_token",
    "bytes/token": "bytes_per_token",
}  # fmt: skip


def make_drafter(
    name: str,
    scope: str,
    draft_length: int,
    corpus: Path | None = None,
    cross_prompt: bool = SpeculationConfig.cross_prompt,
):
    """A drafter by its name, one of NAMES.

    Args:
        scope: request, group or history: whose tokens it drafts from.
        draft_length: draft tokens of a request at most.
        corpus: file of sam.corpus, used by sam alone.
        cross_prompt: whether sam remembers other prompts.

    Raises:
        ValueError: unknown name, or its package is not installed.
    """
    if name == "sam":
        limits = {"history_tokens": HISTORY_TOKENS, "corpus": corpus, "cross_prompt": cross_prompt}
        drafter = Drafter(max_draft_tokens=draft_length, scope=scope, **limits)
        drafter.warm_up()
        return drafter
    if name not in NAMES:
        raise ValueError(f"drafter {name!r}: expected one of {', '.join(NAMES)}")
    try:
        return {"first-occurrence": FirstOccurrence, "ngram": Ngram, "suffix": Suffix}[name](scope != "request")
    except ImportError as error:
        raise ValueError(f"drafter {name}: {error}; install requirements/cpu.txt and requirements/peers.txt") from error


class Stepwise:
    """A drafter of one request at a time behind the interface of sam.drafting.drafter.Drafter; `in_group` as a
    subclass's, which has `propose(request_id, budget)`: up to `budget` tokens to follow the request's text."""

    nbytes = 0

    def __init__(self, in_group: bool):
        self._texts: dict[str, tuple[np.ndarray, int]] = {}  # a buffer, and how much of it is used

    def text(self, request_id: str) -> np.ndarray:
        """int32 [length], a request's prompt and tokens."""
        buffer, used = self._texts[request_id]
        return buffer[:used]

    def start(self, request_id, prompt, policy_version=0):
        self._texts[request_id] = np.array(prompt, dtype=np.int32), len(prompt)

    def append(self, request_ids, token_ids, offsets):
        for row, request_id in enumerate(request_ids):
            self.add(request_id, token_ids[offsets[row] : offsets[row + 1]])

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append a request's new tokens."""
        buffer, used = self._texts[request_id]
        if used + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer[:used], np.empty(used + len(tokens) + 1024, np.int32)])
        buffer[used : used + len(tokens)] = tokens
        self._texts[request_id] = buffer, used + len(tokens)

    def draft(self, request_ids, budgets):
        pairs = zip(request_ids, budgets.tolist(), strict=True)
        drafts = [np.asarray(self.propose(name, budget), dtype=np.int32) for name, budget in pairs]
        bounds, flat = np.cumsum([0, *map(len, drafts)]), np.concatenate([np.empty(0, np.int32), *drafts])
        return Drafts(flat, bounds, np.ones(len(flat), np.float32))

    def finish(self, request_id):
        del self._texts[request_id]


class FirstOccurrence(Stepwise):
    """The drafter of the published recipe (cann-recipes-train, llm_rl/qwen3), of each request by itself: what followed
    the longest repeated suffix at first."""

    def propose(self, request_id, budget):
        text = self.text(request_id)
        # Four bytes a token, so that the search of bytes finds the suffix; one that repeats has shorter ones that do.
        string, shortest, longest = text.astype(">i4").tobytes(), 0, len(text) - 1
        while shortest < longest:
            length = (shortest + longest + 1) // 2
            shortest, longest = (length, longest) if self._first(string, length) >= 0 else (shortest, length - 1)
        start = self._first(string, shortest) + shortest
        return text[start : start + budget] if shortest else []

    @staticmethod
    def _first(string: bytes, length: int) -> int:
        """Where the last `length` tokens occur before, at first; -1: nowhere."""
        place, suffix = -1, string[len(string) - 4 * length :]
        while (place := string.find(suffix, place + 1, len(string) - 1)) % 4:
            if place < 0:
                return -1
        return place // 4


class Ngram(Stepwise):
    """vLLM's prompt lookup with this project's default lengths."""

    LIMITS = *LOOKUP, 1 << 30  # the longest text

    def __init__(self, in_group: bool):
        from sam.vllm.bench.engine import prompt_lookup

        super().__init__(in_group)
        self._propose = prompt_lookup()

    def propose(self, request_id, budget):
        return self._propose(self.text(request_id), *self.LIMITS, budget)


class Suffix(Stepwise):
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH, LIMITS = 24, {"max_spec_factor": 1.0, "min_token_prob": 0.1}

    def __init__(self, in_group: bool):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        super().__init__(in_group)
        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if in_group else 0)

    def start(self, request_id, prompt, policy_version=0):
        super().start(request_id, prompt)
        self._cache.start_request(request_id, prompt)

    def add(self, request_id, tokens):
        super().add(request_id, tokens)
        if len(tokens):
            self._cache.add_active_response(request_id, tokens.tolist())

    def propose(self, request_id, budget):
        end = self.text(request_id)[-self.DEPTH :]
        return self._cache.speculate(request_id, end, max_spec_tokens=budget, **self.LIMITS).token_ids

    def finish(self, request_id):
        super().finish(request_id)
        self._cache.stop_request(request_id)


class Request:
    """A recorded response, generated on one of the replicas, but for what was given to the model.

    Attributes:
        accepted: tokens that are generated or given; the drafter of its replica has seen them.
        seen_elsewhere: of them, those that the other replicas' drafters have seen.
        rounds_since_end: of the group, after its last token.
    """

    def __init__(self, name: str, response: np.ndarray, replica: int = 0, given: Spans = ()):
        self.name, self.response, self.replica, self.given = name, response, replica, given
        self.accepted = self.seen_elsewhere = self.rounds_since_end = 0

    def verify(self, draft: np.ndarray) -> tuple[int, int, np.ndarray]:
        """Accept the draft's correct tokens and the bonus token; returns how many of the draft, how many are generated,
        and the new tokens: those, and at a turn's end what is given behind it."""
        start = self.accepted
        end, behind = next(((begin, end) for begin, end in self.given if begin > start), 2 * [len(self.response)])
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

    def arrive(self, delay: int) -> np.ndarray:
        """The tokens that reach other replicas now, `delay` tokens late; a round after the last one is as a token."""
        seen, end = self.seen_elsewhere, min(self.accepted, self.accepted + self.rounds_since_end - delay)
        self.seen_elsewhere = max(seen, end)
        return self.response[seen : self.seen_elsewhere]


class Replay:
    """Verify steps of recorded responses, as an engine that speculates would have generated them, and their counts.

    Args:
        draft_length: draft tokens of a sample in a step.
        order: of samples within a round: turns (round robin, each seeing the one before) or engine (all at once).
        delay: tokens that a sample generates after a token before the other replicas' drafters have seen that one;
            None: they never do.
        progress: called with the tokens advanced since the last call.

    Attributes:
        tokens, given, steps: generated tokens, those given to the model, and verify steps of a request.
        accepted_at, drafted_at: int64 [draft_length], by position in the draft.
        by_probability: float64 [10, 3], by tenth of a draft's probability: drafts, sum of probabilities, accepted.
        drafting, appending: seconds in the drafters' calls.
    """

    def __init__(
        self,
        draft_length: int,
        order: str = "turns",
        delay: int | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
    ):
        self.draft_length, self.order, self.delay, self.progress = draft_length, order, delay, progress
        self.tokens = self.given = self.steps = 0
        self.accepted_at, self.drafted_at = np.zeros((2, draft_length), dtype=np.int64)
        self.by_probability = np.zeros((PROBABILITY_BINS, 3))
        self.drafting = self.appending = 0.0

    def group(
        self,
        drafters: list,
        name: str,
        prompt: np.ndarray,
        responses: list[np.ndarray],
        given: list[Spans],
        policy_version: int = 0,
    ) -> None:
        """Replay samples of one prompt, spread round robin over the drafters of the replicas.

        To a drafter a sample that is generated elsewhere is one more request, for which it does not draft. A replica
        without a sample of the prompt gets none.
        """
        replicas, delay = len(drafters), self.delay
        texts = enumerate(zip(responses, given, strict=True))
        live = requests = [Request(f"{name}/{i}", text, i % replicas, spans) for i, (text, spans) in texts if len(text)]
        shown = [[one for one in requests if one.replica == i or delay is not None] for i in range(replicas)]
        shown = [its if any(one.replica == i for one in its) else [] for i, its in enumerate(shown)]
        for drafter, its in zip(drafters, shown, strict=True):
            for request in its:
                drafter.start(request.name, prompt, policy_version)

        def deliver(batch: list[Request], delay: int) -> None:
            arrived = [(request, new) for request in batch if len(new := request.arrive(delay))]
            for replica, drafter in enumerate(drafters):
                elsewhere = [pair for pair in arrived if pair[0].replica != replica and shown[replica]]
                self._append(drafter, [request for request, _ in elsewhere], [new for _, new in elsewhere])

        while live:
            for batch in [live] if self.order == "engine" else [[request] for request in live]:
                for replica, drafter in enumerate(drafters):
                    if own := [request for request in batch if request.replica == replica]:
                        self.step(drafter, own)
                if delay is not None:
                    deliver(batch, delay)
            live = [request for request in live if not request.finished]
            if delay is not None:
                for request in (ended := [request for request in requests if request.finished]):
                    request.rounds_since_end += 1
                deliver(ended, delay if live else 0)
        for drafter, its in zip(drafters, shown, strict=True):
            for request in its:
                drafter.finish(request.name)

    def step(self, drafter, batch: list[Request]) -> None:
        """Draft for requests at once, verify, and show the drafter their new tokens."""
        names, budgets = [request.name for request in batch], np.full(len(batch), self.draft_length, dtype=np.int32)
        started = time.perf_counter()
        drafts = drafter.draft(names, budgets)
        self.drafting += time.perf_counter() - started
        pieces = []
        for row, request in enumerate(batch):
            part, position = slice(drafts.offsets[row], drafts.offsets[row + 1]), request.accepted
            accepted, generated, new = request.verify(drafts.token_ids[part])
            self.count(position, drafts.acceptance[part], accepted, generated)
            self.given += len(new) - generated
            pieces.append(new)
        self._append(drafter, batch, pieces)
        self.progress(sum(map(len, pieces)))

    def _append(self, drafter, requests: list[Request], pieces: list[np.ndarray]) -> None:
        if requests:
            offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
            names, tokens = [request.name for request in requests], np.concatenate(pieces)
            started = time.perf_counter()
            drafter.append(names, tokens, offsets)
            self.appending += time.perf_counter() - started

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        """Count a verify step at response position `position`; `acceptance` are its drafts' probabilities."""
        self.steps += 1
        self.tokens += advanced
        self.drafted_at[: len(acceptance)] += 1
        self.accepted_at[:accepted] += 1
        for i, probability in enumerate(acceptance.tolist()):
            row = self.by_probability[min(PROBABILITY_BINS - 1, int(PROBABILITY_BINS * probability))]
            row += (1, probability, i < accepted)

    def summary(self) -> dict:
        """The results; mean acceptance length counts the bonus token, 1.0 is no gain."""
        accepted, drafted = int(self.accepted_at.sum()), int(self.drafted_at.sum())
        by_place = zip(self.accepted_at.tolist(), self.drafted_at.tolist(), strict=True)
        return {
            "tokens": self.tokens,
            "given_tokens": self.given,
            "steps": self.steps,
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "acceptance_rate": round(accepted / max(1, drafted), 4),
            "acceptance_per_position": [round(right / max(1, all_), 4) for right, all_ in by_place],
            "calibration_error": round(max(abs(p - o) for p, o in self.calibration()), 4) if drafted else None,
        }

    def calibration(self) -> list[tuple[float, float]]:
        """(predicted probability, observed acceptance) of each tenth of the predictions that has drafts."""
        return [(float(p / n), float(o / n)) for n, p, o in self.by_probability if n]


def replay(recording: Recording, make, draft_length: int, replicas: int = 1, epochs: str = "together", **how) -> Replay:
    """Replay all prompts, one after the other.

    Args:
        make: makes a drafter (start, append, draft, finish as sam.drafting.drafter.Drafter), once for each replica.
        replicas: over which the samples of a prompt are spread.
        epochs: together; or kept: epoch by epoch, the first one not counted; or forgotten: so, with new drafters each
            time.
        how: further arguments of `Replay`.

    Raises:
        ValueError: the recording has fewer than two epochs, and they are not taken together.
    """
    result = Replay(draft_length, **how)
    parts = [recording] if epochs == "together" else recording.by_epoch()
    for epoch, part in enumerate(parts):
        if epoch == 0 or epochs == "forgotten":
            drafters = [make() for _ in range(replicas)]
        counts = Replay(draft_length, **how) if epoch == 0 and len(parts) > 1 else result
        for index, group in enumerate(part.groups()):
            counts.group(drafters, str(index), *group, policy_version=epoch)
    return result


def measure_cost(recording: Recording, make, draft_length: int, **how) -> dict:
    """Measure drafting with up to RUNNING_REQUESTS requests of all prompts at once.

    Returns:
        draft_us_per_step: microseconds of a call to draft, per request.
        us_per_token: microseconds of appending and drafting, per generated token.
        bytes_per_token: memory of the drafter at its largest, per token that it holds.
    """
    drafter, result, samples = make(), Replay(draft_length, **how), max(map(len, recording.responses))
    waiting = [
        (prompt, Request(f"{index}/{i}", responses[i], given=given[i]))
        for i in range(samples)
        for index, (prompt, responses, given) in enumerate(recording.groups())
        if i < len(responses) and len(responses[i])
    ][::-1]
    live: list[Request] = []
    most_bytes, held = 0, 1
    while live or waiting:
        while waiting and len(live) < RUNNING_REQUESTS:
            prompt, request = waiting.pop()
            drafter.start(request.name, prompt)
            live.append(request)
        result.step(drafter, live)
        if drafter.nbytes > most_bytes:
            most_bytes, held = drafter.nbytes, result.tokens + result.given + sum(map(len, recording.prompts))
        for request in (ended := [request for request in live if request.finished]):
            drafter.finish(request.name)
        live = [request for request in live if request not in ended] if ended else live
    return {
        "draft_us_per_step": round(1e6 * result.drafting / result.steps, 3),
        "us_per_token": round(1e6 * (result.drafting + result.appending) / result.tokens, 3),
        "bytes_per_token": round(most_bytes / held, 1),
    }


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Replay every file with every drafter; yields a row each."""
    how = {name: getattr(options, name) for name in ("replicas", "delay", "epochs")}
    for path in options.traces:
        recording = read_recording(path, options.tokenizer)
        for name in options.drafter:
            make = partial(make_drafter, name, options.scope, options.k, options.corpus)
            with tqdm(total=2 * recording.num_tokens, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(recording, make, options.k, progress=bar.update, **how).summary()
                cost = measure_cost(recording, make, options.k, progress=bar.update)
            head = {"file": path.name, "drafter": name} | {key: getattr(options, key) for key in SETTINGS}
            yield {**head, **result, **cost}


def table(rows: Iterable[dict]) -> str:
    """The rows as text, one line for each file and drafter; only sam predicts what is accepted."""
    rows = [row | ({} if row["drafter"] == "sam" else {"calibration_error": "-"}) for row in rows]
    cells = [[row[key] for key in COLUMNS.values()] for row in rows]
    words = [[f"{value:.3f}" if type(value) is float else str(value) for value in row] for row in cells]
    return "\n".join(laid_out(list(COLUMNS), words))


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and refuse options that do not go together."""
    parser = Parser(prog="sam replay", description="How drafters do on recorded responses, without an engine.")
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or verl's .jsonl dumps")
    parser.add_argument("--drafter", nargs="+", default=["sam"], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--scope", choices=("request", "group", "history"), default="group")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step (default 3)")
    parser.add_argument("--replicas", type=int, default=1, help="spread a prompt's samples over N drafters (default 1)")
    parser.add_argument("--delay", type=int, metavar="TOKENS", help="replicas see each other's tokens, so much later")
    parser.add_argument("--epochs", action="store_true", help="epoch by epoch, the first one not counted")
    parser.add_argument("--corpus", type=Path, help="file of sam.corpus that sam drafts from as well")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    for name in ("k", "replicas"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    if options.delay is not None and (options.delay < 0 or options.replicas == 1):
        parser.error(f"--delay {options.delay}: expected 0 or more, and --replicas 2 or more")
    options.epochs = "together" if not options.epochs else "kept" if options.scope == "history" else "forgotten"
    return options


def main(arguments: list[str] | None = None) -> int:
    def shown() -> str | Iterable[str]:
        options = options_of(arguments)
        return map(json.dumps, run(options)) if options.json else table(run(options))

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
