"""Recorded rollouts: prompts and their responses as token ids."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam.reading import LARGEST_TOKEN, ReadError, expect, json_rows, npz_arrays, token_ids, whole_numbers
from sam.record.tokenizer import Tokenizer

ARRAYS = ("prompt_tokens", "prompt_offsets", "response_tokens", "response_offsets", "response_prompt")
TOKENS, TEXT = ("prompt_tokens", "response_tokens"), ("input", "output")  # rows of this project, and of verl's dumps


@dataclass(frozen=True)
class Recording:
    """Responses grouped by prompt.

    Attributes:
        prompts: int32 arrays.
        responses: for each prompt its samples, int32 arrays.
        epochs: for each prompt the epochs in which its samples were generated; None: not recorded.
    """

    prompts: list[np.ndarray]
    responses: list[list[np.ndarray]]
    epochs: list[list[int]] | None = None

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return sum(len(response) for samples in self.responses for response in samples)

    def by_epoch(self) -> list["Recording"]:
        """A recording for each epoch, the earliest first, all of them with all prompts.

        Raises:
            ValueError: no epochs are recorded, or only one.
        """
        numbers = sorted({epoch for epochs in self.epochs or [] for epoch in epochs})
        if len(numbers) < 2:
            raise ValueError(f"{len(numbers)} epochs in this recording: expected two or more in response_epoch")
        pairs = list(zip(self.responses, self.epochs, strict=True))
        return [
            Recording(self.prompts, [[r for r, e in zip(*pair, strict=True) if e == number] for pair in pairs])
            for number in numbers
        ]


def join(recordings: list[Recording]) -> Recording:
    """All prompts of several recordings as one."""
    epochs = [e for r in recordings for e in r.epochs or []]
    prompts, responses = [p for r in recordings for p in r.prompts], [s for r in recordings for s in r.responses]
    return Recording(prompts, responses, epochs if len(epochs) == len(prompts) else None)


def read_recordings(path: Path, tokenizer: str | None = None) -> Recording:
    """`read_recording` of a file, or of all steps of a run directory of this project, in their order.

    Raises:
        ReadError: as `read_recording`, or a folder without rollouts.
    """
    if not path.is_dir():
        return read_recording(path, tokenizer)
    steps = sorted((path / "rollouts").glob("*.jsonl"), key=lambda file: (len(file.name), file.name))
    if not steps:
        raise ReadError(f"{path}: no rollouts/*.jsonl in this folder; expected a run directory or a recording's file")
    return join([read_recording(step, tokenizer) for step in steps])


def read_recording(path: Path, tokenizer: str | None = None) -> Recording:
    """Read a .npz of arrays (`ARRAYS`), this project's rollouts/<step>.jsonl, or a dump of verl's rollout_data_dir.

    Args:
        path: .npz, which may have `response_epoch` (int32 [responses]) too, or .jsonl.
        tokenizer: folder or name; only verl's dumps, which hold text, need it.

    Raises:
        ReadError: no such file, a folder, another format, a dump of text without a tokenizer, or no response in it.
    """
    if path.is_dir():
        raise ReadError(f"{path}: a folder; expected files, such as {path}/*.npz or {path}/*.jsonl")
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    if path.suffix not in (".npz", ".jsonl"):
        raise ReadError(f"{path}: expected .npz or .jsonl")
    recording = _from_arrays(path) if path.suffix == ".npz" else by_prompt(_pairs(path, tokenizer))
    if not recording.num_tokens:
        raise ReadError(f"{path}: no token of a response in it; expected recorded responses")
    for number, prompt in enumerate(recording.prompts, start=1):
        expect(len(prompt) > 0, f"{path}, prompt {number}", "at least one token", "none")
    return recording


def _from_arrays(path: Path) -> Recording:
    arrays = npz_arrays(path, str(path))
    for name in ARRAYS:
        expect(name in arrays, str(path), f"the arrays {', '.join(ARRAYS)}", sorted(arrays))
    prompts, pieces = _texts(arrays, "prompt", path), _texts(arrays, "response", path)
    numbers = whole_numbers(arrays["response_prompt"], len(prompts) - 1, f"{path}, response_prompt")
    expect(len(numbers) == len(pieces), f"{path}, response_prompt", f"{len(pieces)} numbers of prompts", len(numbers))
    has_epochs = "response_epoch" in arrays
    recorded = arrays["response_epoch"] if has_epochs else np.zeros(len(pieces), np.int32)
    recorded = whole_numbers(recorded, 2**31 - 1, f"{path}, response_epoch")
    expect(len(recorded) == len(pieces), f"{path}, response_epoch", f"{len(pieces)} epochs", len(recorded))
    responses: list[list[np.ndarray]] = [[] for _ in prompts]
    epochs: list[list[int]] = [[] for _ in prompts]
    for prompt, response, epoch in zip(numbers, pieces, recorded.tolist(), strict=True):
        responses[prompt].append(response)
        epochs[prompt].append(epoch)
    return Recording(prompts, responses, epochs if has_epochs else None)


def _texts(arrays: dict[str, np.ndarray], of: str, path: Path) -> list[np.ndarray]:
    """The texts in `of`_tokens, each from one of `of`_offsets to the next."""
    tokens = whole_numbers(arrays[f"{of}_tokens"], LARGEST_TOKEN, f"{path}, {of}_tokens").astype(np.int32)
    offsets = whole_numbers(arrays[f"{of}_offsets"], len(tokens), place := f"{path}, {of}_offsets")
    is_whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) >= 0).all()
    expect(is_whole, place, f"offsets that rise from 0 to {len(tokens)}, the tokens there are", offsets.tolist())
    return [tokens[begin:end] for begin, end in itertools.pairwise(offsets)]


def _pairs(path: Path, tokenizer: str | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompt and response of each row; all rows are of the first one's kind."""
    names: tuple[str, ...] = ()
    encoder = Tokenizer(tokenizer) if tokenizer is not None else None

    def read(row: dict, place: str) -> list[np.ndarray]:
        nonlocal names
        names = names or next((kind for kind in (TOKENS, TEXT) if kind[1] in row), ())
        for name in names or TOKENS:
            expect(name in row, place, f"a row with {' and '.join(names or (*TOKENS, *TEXT))}", sorted(row))
        if names == TOKENS:
            return [token_ids(row[name], f"{place}, {name}") for name in names]
        if encoder is None:
            raise ReadError(f"{path} holds text: name its tokenizer with --tokenizer")
        return [np.array(encoder.encode(row[name], f"{place}, {name}"), np.int32) for name in names]

    return json_rows(path, read)


def by_prompt(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Recording:
    """A recording of prompts and responses, int32 [length]; those of the same prompt are its samples."""
    groups: dict[bytes, tuple[np.ndarray, list[np.ndarray]]] = {}
    for prompt, response in pairs:
        groups.setdefault(prompt.tobytes(), (prompt, []))[1].append(response)
    return Recording([prompt for prompt, _ in groups.values()], [samples for _, samples in groups.values()])
