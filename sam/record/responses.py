"""Recorded responses as token ids, and the config and metrics of the run directory they lie in."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam.reading import (
    TOKEN,
    ReadError,
    Values,
    array_of,
    content_of,
    expect,
    json_rows,
    npz_arrays,
    one_line,
    parquet_rows,
    token_ids,
)
from sam.record.tokenizer import Tokenizer

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
Spans = Sequence[Sequence[int]]  # [begin, end) of tokens of a response that the model did not write: tools' outputs
LARGEST = 1e300  # of a figure, so that sums of figures are finite too
ARRAYS = ("prompt_tokens", "prompt_offsets", "response_tokens", "response_offsets", "response_prompt")
NUMBER = Values("a number", "int64")  # of a prompt, an epoch, or a token
TOKENS = ("prompt_tokens", "response_tokens")  # of a row of this project
# Of a row of text, in a dump of verl's or in data for fine-tuning; or it has the `messages` of a chat.
PROMPTS = ("input", "prompt", "question")
RESPONSES = ("output", "response", "answer")
FILES = (".npz", ".jsonl", ".parquet")
# A prompt with its responses, and what was given to the model in these.
RecordedGroup = tuple[np.ndarray, list[np.ndarray], list[Spans]]


@dataclass(frozen=True)
class Recording:
    """Responses grouped by prompt."""

    prompts: list[np.ndarray]  # int32 [tokens]
    responses: list[list[np.ndarray]]  # for each prompt its samples, int32 [tokens]
    epochs: list[list[int]] | None = None  # in which these were generated; None: not recorded
    given: list[list[Spans]] | None = None  # of each, what was given to the model; None: nothing

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return sum(len(response) for samples in self.responses for response in samples)

    def check_generated(self, source: object) -> None:
        """Raise ReadError where a response holds what the model did not write; its line begins with `source`."""
        if any(map(any, self.given or ())):
            raise ReadError(
                f"{source}: responses with tools' outputs: expected text of the model alone; sam replay reads these"
            )

    def groups(self) -> Iterator[RecordedGroup]:
        """Each prompt with its responses and what was given to the model in these."""
        given = self.given or [[()] * len(samples) for samples in self.responses]
        return zip(self.prompts, self.responses, given, strict=True)

    def by_epoch(self) -> list["Recording"]:
        """A recording for each epoch, the earliest first, all of them with all prompts; ValueError without two."""
        numbers = sorted({epoch for epochs in self.epochs or [] for epoch in epochs})
        if len(numbers) < 2:
            raise ValueError(f"{len(numbers)} epochs in this recording: expected two or more in response_epoch")
        recordings = []
        for number in numbers:
            responses = [
                [response for response, epoch in zip(samples, epochs, strict=True) if epoch == number]
                for samples, epochs in zip(self.responses, self.epochs, strict=True)
            ]
            recordings.append(Recording(self.prompts, responses))
        return recordings


def join(recordings: list[Recording]) -> Recording:
    """All prompts of several recordings as one, without their epochs."""
    return of_groups(group for recording in recordings for group in recording.groups())


def of_groups(groups: Iterable[RecordedGroup]) -> Recording:
    """A recording of these groups, one or more."""
    prompts, responses, given = map(list, zip(*groups, strict=True))
    return Recording(prompts, responses, given=given)


def by_prompt(rows: Iterable[tuple[np.ndarray, np.ndarray, Spans]]) -> Recording:
    """A recording of prompts, responses (int32 [length]) and what was given to the model in these; those of the same
    prompt are its samples."""
    groups: dict[bytes, RecordedGroup] = {}
    for prompt, response, given in rows:
        _, samples, spans = groups.setdefault(prompt.tobytes(), (prompt, [], []))
        samples.append(response)
        spans.append(given)
    return of_groups(groups.values()) if groups else Recording([], [], given=[])


def read_recording(path: Path, tokenizer: str | None = None) -> Recording:
    """Read recorded responses; ReadError where there are none.

    Args:
        path: a .npz of arrays (`ARRAYS`, and perhaps `response_epoch`, int32 [responses]), this project's
            rollouts/<step>.jsonl, a .jsonl or Parquet file of texts (`PROMPTS`, `RESPONSES`) as verl dumps them, or a
            folder of such dumps, or a run directory of this project with all steps.
        tokenizer: folder or name; only files of text need it.
    """
    if path.is_dir():
        return join([read_recording(step, tokenizer) for step in files_of(path)])
    encoder = Tokenizer(tokenizer) if tokenizer is not None else None
    recording = _from_arrays(path) if path.suffix == ".npz" else by_prompt(rows_of(path, encoder))
    if not recording.num_tokens:
        raise ReadError(f"{path}: no token of a response in it; expected recorded responses")
    for number, prompt in enumerate(recording.prompts, start=1):
        expect(len(prompt) > 0, f"{path}, prompt {number}", "at least one token", "none")
    return recording


def files_of(path: Path) -> list[Path]:
    """The files with the responses of a run directory or of a folder of verl's dumps, step by step."""
    if not path.is_dir():
        return [path]
    files = [*(path / "rollouts").glob("*.jsonl")] or [file for file in path.iterdir() if file.suffix in FILES]
    if not files:
        raise ReadError(f"{path}: no rollouts/*.jsonl in this folder; expected a run directory or a file")
    return sorted(files, key=lambda file: (len(file.name), file.name))


def _from_arrays(path: Path) -> Recording:
    arrays = npz_arrays(path, str(path))
    for name in ARRAYS:
        expect(name in arrays, str(path), f"the arrays {', '.join(ARRAYS)}", sorted(arrays))
    prompts = _texts(arrays, "prompt", path)
    responses = _texts(arrays, "response", path)
    prompt_of = array_of(arrays["response_prompt"], f"{path}, response_prompt", NUMBER)
    fits = len(prompt_of) == len(responses) and np.isin(prompt_of, np.arange(len(prompts))).all()
    expect(fits, f"{path}, response_prompt", f"{len(responses)} numbers below {len(prompts)}", prompt_of.tolist())
    samples_of = [np.flatnonzero(prompt_of == number) for number in range(len(prompts))]
    epochs = None
    if "response_epoch" in arrays:
        epoch_of = array_of(arrays["response_epoch"], f"{path}, response_epoch", NUMBER)
        fits = len(epoch_of) == len(responses)
        expect(fits, f"{path}, response_epoch", f"{len(responses)} numbers", epoch_of.tolist())
        epochs = [epoch_of[samples].tolist() for samples in samples_of]
    return Recording(prompts, [[responses[i] for i in samples] for samples in samples_of], epochs)


def _texts(arrays: dict[str, np.ndarray], kind: str, path: Path) -> list[np.ndarray]:
    """The texts in `kind`_tokens, each from one of `kind`_offsets to the next."""
    tokens = array_of(arrays[f"{kind}_tokens"], f"{path}, {kind}_tokens", TOKEN)
    offsets = array_of(arrays[f"{kind}_offsets"], f"{path}, {kind}_offsets", NUMBER).tolist()
    is_whole = offsets[:1] == [0] and offsets[-1] == len(tokens) and offsets == sorted(offsets)
    expected = f"offsets that rise from 0 to {len(tokens)}, the tokens there are"
    expect(is_whole, f"{path}, {kind}_offsets", expected, offsets)
    return [tokens[begin:end] for begin, end in itertools.pairwise(offsets)]


def rows_of(path: Path, encoder: Tokenizer | None) -> Iterator[tuple[np.ndarray, np.ndarray, Spans]]:
    """Prompt, response and what was given in it of each row of a file, one after the other; ReadErrors."""
    if path.suffix not in FILES:
        raise ReadError(f"{path}: expected {', '.join(FILES)}")
    if path.suffix == ".npz":
        groups = _from_arrays(path).groups()
        return ((prompt, response, ()) for prompt, responses, _given in groups for response in responses)

    def encoded(text: Any, place: str) -> np.ndarray:
        """Token ids of a text, or of a chat."""
        if encoder is None:
            raise ReadError(f"{path} holds text: name its tokenizer with --tokenizer")
        ids = encoder.encode(text, place) if isinstance(text, str) else encoder.chat(text, place)
        return np.array(ids, np.int32)

    def read(row: dict, place: str) -> tuple[np.ndarray, np.ndarray, Spans]:
        if TOKENS[1] in row:
            return _texts_of(row, place)
        chat = row.get("messages")
        if chat:
            is_chat = isinstance(chat, list) and len(chat) > 1 and isinstance(chat[-1], dict)
            expect(is_chat, f"{place}, messages", "a prompt and a response", chat)
            row = {PROMPTS[0]: chat[:-1], RESPONSES[0]: chat[-1].get("content")}
        prompt = next((row[name] for name in PROMPTS if name in row), "")
        name = next((name for name in RESPONSES if name in row), None)
        if name is None:
            return _texts_of(row, place)
        expect(isinstance(row[name], str), f"{place}, {name}", "a text", row[name])
        return encoded(prompt, f"{place}, prompt"), encoded(row[name], f"{place}, {name}"), ()

    if path.suffix == ".jsonl":
        return json_rows(path, read)
    return parquet_rows(path, read)


def _texts_of(row: dict, place: str) -> tuple[np.ndarray, np.ndarray, Spans]:
    """Prompt, response and what was given in it, of a row with token ids; rows of older runs have no given_spans."""
    for name in TOKENS:
        expect(name in row, place, f"a row with {' and '.join(TOKENS)}, or {' or '.join(RESPONSES)}", sorted(row))
    prompt, response = (token_ids(row[name], f"{place}, {name}") for name in TOKENS)
    spans = row.get("given_spans", [])
    with one_line(f"{place}, given_spans", f"expected pairs of numbers from 0 to {len(response)}, rising"):
        edges = [0, *(edge for begin, end in spans for edge in (begin, end)), len(response)]
        is_whole = all(type(edge) is int for edge in edges) and all(begin < end for begin, end in spans)
        if not is_whole or edges != sorted(edges):
            raise ValueError(spans)
    return prompt, response, spans


class Response(NamedTuple):
    """A recorded response: its prompt's number in the training step, its sample's, the generation round, tokens, and
    what of them was given to the model."""

    prompt: int
    sample: int
    round: int
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    given_spans: Spans


def responses_path(directory: Path, step: int) -> Path:
    """The file of a training step's responses."""
    return directory / "rollouts" / f"{step}.jsonl"


def read_responses(directory: Path, step: int) -> list[Response]:
    """The responses of a training step, in dispatch order; ReadError if one cannot be read."""

    def read(row: dict[str, Any], place: str) -> Response:
        numbers = [row.get("prompt"), row.get("sample"), row.get("round", 0)]
        expect(all(type(n) is int for n in numbers), place, "whole numbers as prompt, sample and round", numbers)
        return Response(*numbers, *_texts_of(row, place))

    path = responses_path(directory, step)
    responses = list(json_rows(path, read))
    expect(bool(responses), str(path), "a row for each response", "none")
    return responses


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of config.yaml, those of `speculation` among them; ReadError if there are none."""
    import yaml

    path = directory / CONFIG_FILE
    content = content_of(path)
    with one_line(str(path), "not the config of a run of sam run"):
        config = yaml.safe_load(content)
        if not isinstance(config["speculation"]["method"], str):
            raise ValueError("no speculation.method")
    return config


def read_metrics(directory: Path, left_out: list[str] | None = None) -> dict[int, dict[str, float]]:
    """Training step to its figures in metrics.jsonl; those that are no finite numbers are not recorded.

    Rows that cannot be read, which a full disk leaves, are a ReadError, or a line in `left_out`. Half a last line is no
    row: the run goes on.
    """

    def read(row: dict[str, Any], place: str) -> tuple[int, dict[str, float]]:
        step = row.pop("step", None)
        expect(type(step) is int and step >= 0, f"{place}, step", "a training step", step)
        for key, value in row.items():
            expect(type(value) in (int, float), f"{place}, {key}", "a number", value)
        # A mean of nothing is not a number.
        return step, {key: float(value) for key, value in row.items() if abs(value) < LARGEST}

    metrics: dict[int, dict[str, float]] = {}
    for step, figures in json_rows(directory / METRICS_FILE, read, left_out, is_growing=True):
        metrics.setdefault(step, {}).update(figures)
    return metrics
