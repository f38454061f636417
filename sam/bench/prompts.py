"""What requests are asked, as token ids: prompts from a file or built in, or a recording with the responses to them.

All of it is compared with the model before an engine starts.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from sam.bench.settings import engine_arguments
from sam.reading import ReadError, expect, json_object, json_rows, one_line, token_ids
from sam.record.responses import read_recordings
from sam.record.tokenizer import Tokenizer
from sam.trained_drafter import wrong_kind

QUESTION = (
    "A workshop makes {a} chairs and {b} tables a day. A chair needs {c} screws and a table needs {d}. "
    "How many screws does the workshop need in {e} days? Think step by step.\n"
)
BUILT_IN = "the built-in prompts"


class Group(NamedTuple):
    """A prompt and, where the text is forced, the responses that its requests emit, as token ids."""

    prompt: list[int]
    responses: list[list[int]] | None = None


def vocabulary_of(model: Path) -> int | None:
    """Tokens that a model knows, by its folder's config.json; None where it does not say.

    Raises:
        ReadError: there is none, or the number is none.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ReadError(f"{model}: no config.json there; expected the folder of a model")
    config = json_object(path)
    of_text = config.get("text_config") or {}  # of models that read pictures too
    expect(isinstance(of_text, dict), f"{path}, text_config", "a JSON object", of_text)
    size = of_text.get("vocab_size", config.get("vocab_size"))
    expect(size is None or (type(size) is int and size > 0), f"{path}, vocab_size", "a number above 0", size)
    return size


def check_draft_model(folder: Path, vocabulary: int | None, variants: list[str]) -> None:
    """Raise ValueError unless a folder holds what all these variants draft with, of the model's vocabulary."""
    try:
        own = vocabulary_of(folder)
    except ValueError as error:
        raise ValueError(f"--draft-model {error}") from error
    for variant in variants:
        if found := wrong_kind(folder, variant):
            raise ValueError(
                f"--draft-model {folder}: holds {found}, --variants {variant} drafts with the other kind: take another "
                "folder, or hybrid, which takes both"
            )
    if own != vocabulary:
        raise ValueError(
            f"--draft-model {folder}: its vocab_size is {own}, the model's is {vocabulary}: make one for this model"
        )


def tokenizer_of(model: Path, engine: list[str]) -> Path | None:
    """Folder of the tokenizer: the model's, or the one that the engine's arguments name; None where there is none.

    Raises:
        ValueError: they name a folder without a tokenizer.
    """
    named = engine_arguments(engine).get("tokenizer")
    folder = Path(named) if named else model
    if any(folder.glob("*token*")):
        return folder
    if named:
        raise ValueError(f"--tokenizer {named}: no tokenizer there; expected a folder with one")
    return None


def read_prompts(path: Path | None, tokenizer: Path | None, most: int | None = None) -> list[list[int]]:
    """Token ids of a file's prompts, the first `most` of them, or of `most` built-in ones.

    Args:
        path: .jsonl with `prompt` (text, or messages of a chat) or `prompt_token_ids` in each line, or .parquet with a
            column of either name, as recipe.data writes it; None for built-in prompts.
        tokenizer: folder of what turns text into tokens, or None.

    Raises:
        ReadError: no such file, another format, no prompt in it, or text without a tokenizer.
    """
    encoder = Tokenizer(tokenizer) if tokenizer is not None else None

    def read(row: dict, place: str) -> list[int]:
        if (ids := row.get("prompt_token_ids")) is not None:
            expect(bool(ids), f"{place}, prompt_token_ids", "at least one token", ids)
            return token_ids(ids, f"{place}, prompt_token_ids").tolist()
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise ReadError(f"{place}: neither a text or a chat as prompt nor prompt_token_ids in it")
        if encoder is None:
            remedy = "give --prompts with prompt_token_ids, or --text"
            raise ReadError(f"{place}: it is text, and the model's folder has no tokenizer: {remedy}")
        place = f"{place}, prompt"
        ids = encoder.encode(prompt, place, special=True) if isinstance(prompt, str) else encoder.chat(prompt, place)
        expect(bool(ids), place, "at least one token", prompt)
        return ids

    if path is None:
        return [read({"prompt": question(n)}, f"{BUILT_IN}, prompt {n + 1}") for n in range(most)]
    if path.suffix not in (".jsonl", ".parquet"):
        raise ReadError(f"{path}: expected .jsonl or .parquet")
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    rows = json_rows(path, read) if path.suffix == ".jsonl" else itertools.starmap(read, _table(path))
    prompts = list(itertools.islice(rows, most))
    expect(bool(prompts), str(path), "prompts in it", "none")
    return prompts


def _table(path: Path) -> list[tuple[dict, str]]:
    """The rows of a .parquet file, with their places."""
    from pyarrow import parquet

    with one_line(str(path), "not a parquet file"):
        names = [name for name in ("prompt", "prompt_token_ids") if name in parquet.read_schema(path).names]
        rows = parquet.read_table(path, columns=names).to_pylist()
    return [(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def question(number: int) -> str:
    """A built-in prompt; all are different."""
    a, b, c, d, e = 12 + number, 3 + 2 * (number % 50), 8 + number % 7, 14 + number % 11, 5 + number % 13
    return QUESTION.format(a=a, b=b, c=c, d=d, e=e)


def read_groups(
    path: Path, tokenizer: Path | None, size: int, max_tokens: int | None = None
) -> tuple[list[Group], list[str]]:
    """Groups of a recording, those of different prompts first; a prompt with more responses gives several.

    Args:
        path: a recording's file, or a run directory.
        tokenizer: folder, for recordings of text.
        size: responses of a group.
        max_tokens: of a response; what follows is cut off. None: responses are whole.

    Returns:
        Groups, and what a reader must know of them.

    Raises:
        ValueError: it cannot be read, or has no prompt with enough responses.
    """
    recording = read_recordings(path, None if tokenizer is None else str(tokenizer))
    pieces: list[tuple[int, Group]] = []
    largest = short = 0
    for prompt, its in zip(recording.prompts, recording.responses, strict=True):
        responses = [response[:max_tokens].tolist() for response in its if len(response)]
        largest = max(largest, len(responses))
        short += len(responses) < size
        for first in range(0, len(responses) - size + 1, size):
            pieces.append((first, Group(prompt.tolist(), responses[first : first + size])))
    if not pieces:
        raise ValueError(
            f"{path}: its largest group has {largest} responses, --samples needs {size}: set it to {largest} or less"
        )
    left_out = f"{short} of {len(recording.prompts)} prompts have fewer than {size} responses and are left out"
    return [group for _, group in sorted(pieces, key=lambda piece: piece[0])], [left_out] if short else []


def check_tokens(groups: list[Group], vocabulary: int | None, source: str) -> None:
    """Raise ValueError if a prompt, or a response to be forced, has a token that the model does not know."""
    for number, group in enumerate(groups if vocabulary else [], start=1):
        for tokens in (group.prompt, *(group.responses or [])):
            if not 0 <= min(tokens) <= max(tokens) < vocabulary:
                unknown = next(token for token in tokens if not 0 <= token < vocabulary)
                place = f"prompt {number}" if tokens is group.prompt else f"a response to prompt {number}"
                raise ValueError(
                    f"{source}: {place} has token {unknown}, the model knows 0 to {vocabulary - 1}: it is of another "
                    "tokenizer than the model"
                )


def digest(value: Any) -> str:
    """A name of token ids."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
