"""Recorded rollouts: prompts and their responses as token ids."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

ARRAYS = ("prompt_tokens", "prompt_offsets", "response_tokens", "response_offsets", "response_prompt")


class TraceError(ValueError):
    """A recording cannot be read; one line says why."""


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
        TraceError: as `read_recording`, or a folder without rollouts.
    """
    if not path.is_dir():
        return read_recording(path, tokenizer)
    steps = sorted((path / "rollouts").glob("*.jsonl"), key=lambda file: (len(file.name), file.name))
    if not steps:
        raise TraceError(f"{path}: no rollouts/*.jsonl in this folder; expected a run directory or a recording's file")
    return join([read_recording(step, tokenizer) for step in steps])


def read_recording(path: Path, tokenizer: str | None = None) -> Recording:
    """Read a .npz of arrays (`ARRAYS`), this project's rollouts/<step>.jsonl, or a dump of verl's rollout_data_dir.

    Args:
        path: .npz, which may have `response_epoch` (int32 [responses]) too, or .jsonl.
        tokenizer: folder or name; only verl's dumps, which hold text, need it.

    Raises:
        TraceError: no such file, a folder, another format, or a dump of text without a tokenizer.
    """
    if path.is_dir():
        raise TraceError(f"{path}: a folder; expected files, such as {path}/*.npz or {path}/*.jsonl")
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    try:
        if path.suffix == ".npz":
            return _from_arrays(dict(np.load(path)))
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            return _from_rows(path, rows, tokenizer)
    except (KeyError, ValueError, OSError, EOFError, BadZipFile) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: not a recording ({error}); expected the arrays {', '.join(ARRAYS)}") from error
    raise TraceError(f"{path}: expected .npz or .jsonl")


def _from_arrays(arrays: dict[str, np.ndarray]) -> Recording:
    prompts = np.split(arrays["prompt_tokens"], arrays["prompt_offsets"][1:-1])
    responses: list[list[np.ndarray]] = [[] for _ in prompts]
    epochs: list[list[int]] = [[] for _ in prompts]
    pieces = np.split(arrays["response_tokens"], arrays["response_offsets"][1:-1])
    recorded = arrays.get("response_epoch", np.zeros(len(pieces), np.int32)).tolist()
    for prompt, response, epoch in zip(arrays["response_prompt"], pieces, recorded, strict=True):
        responses[prompt].append(response.astype(np.int32))
        epochs[prompt].append(epoch)
    prompts = [prompt.astype(np.int32) for prompt in prompts]
    return Recording(prompts, responses, epochs if "response_epoch" in arrays else None)


def _from_rows(path: Path, rows: list[dict], tokenizer: str | None) -> Recording:
    if rows and "response_tokens" in rows[0]:
        pairs = [(row["prompt_tokens"], row["response_tokens"]) for row in rows]
    elif rows and {"input", "output"} <= rows[0].keys():
        if tokenizer is None:
            raise TraceError(f"{path} holds text: name its tokenizer with --tokenizer")
        encode = _encoder(tokenizer)
        pairs = [tuple(encode(row[key]) for key in ("input", "output")) for row in rows]
    else:
        raise TraceError(f"{path}: expected rows with response_tokens, or with input and output as verl dumps them")
    return by_prompt(pairs)


def _encoder(tokenizer: str) -> Callable[[str], list[int]]:
    """Turns text into token ids, without special tokens."""
    file = Path(tokenizer) / "tokenizer.json"
    if not file.is_file():
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(tokenizer)
        return lambda text: slow.encode(text, add_special_tokens=False)
    from tokenizers import Tokenizer  # transformers takes seconds to import

    try:
        fast = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        raise TraceError(f"{file}: not a tokenizer ({error})") from error
    return lambda text: fast.encode(text, add_special_tokens=False).ids


def by_prompt(pairs: Iterable[tuple[list[int], list[int]]]) -> Recording:
    """A recording of prompts and responses; those of the same prompt are its samples."""
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for prompt, response in pairs:
        groups.setdefault(tuple(prompt), []).append(np.array(response, dtype=np.int32))
    return Recording([np.array(prompt, dtype=np.int32) for prompt in groups], list(groups.values()))
