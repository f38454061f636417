"""Prompts as token ids: from a file or built in, checked against the model before an engine starts."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

from sam.bench.loads import Group
from sam.bench.settings import engine_value
from sam.config import WITH_DRAFT_MODEL
from sam.reading import ReadError, expect, json_object, json_rows, one_line, token_ids
from sam.record.tokenizer import Tokenizer
from sam.trained_drafter import wrong_kind

QUESTION = (
    "A workshop makes {a} chairs and {b} tables a day. A chair needs {c} screws and a table needs {d}. "
    "How many screws does the workshop need in {e} days? Think step by step.\n"
)
BUILT_IN = "the built-in prompts"


def model_config(model: Path) -> dict[str, Any]:
    """config.json of a model's folder; of models that read pictures too, with the sizes of what writes text.

    Raises:
        ReadError: there is none, or sizes in it are no numbers.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ReadError(f"{model}: no config.json there; expected the folder of a model")
    config = json_object(path)
    for name in ("text_config", "rope_scaling", "rope_parameters"):
        expect(isinstance(config.get(name) or {}, dict), f"{path}, {name}", "a JSON object", config.get(name))
    config |= config.get("text_config") or {}
    for name in ("vocab_size", "max_position_embeddings"):
        size = config.get(name)
        expect(size is None or (type(size) is int and size > 0), f"{path}, {name}", "a number above 0", size)
    return config


def check_draft_model(folder: Path, config: dict[str, Any], variants: list[str]) -> None:
    """Raise ValueError unless a folder holds what all variants that take one draft with, of the model's vocabulary.

    Args:
        config: the model's config.json.
    """
    try:
        own = model_config(folder)
    except ValueError as error:
        raise ValueError(f"--draft-model {error}") from error
    for variant in (one for one in variants if one in WITH_DRAFT_MODEL):
        if found := wrong_kind(folder, variant):
            expected, other = ("a draft model", "eagle3") if variant == "draft_model" else ("a head", "draft_model")
            raise ValueError(
                f"--draft-model {folder}: holds {found}, --variants {variant} expects {expected}: take another folder, "
                f"or {other} or hybrid among --variants in its place"
            )
    sizes = [one.get("vocab_size") for one in (own, config)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--draft-model {folder}: its vocab_size is {sizes[0]}, the model's is {sizes[1]}: make one for this model"
        )


def tokenizer_of(model: Path, engine: list[str]) -> Path | None:
    """Folder of the tokenizer: the model's, or the one that the engine's arguments name; None where there is none.

    Raises:
        ValueError: they name a folder without a tokenizer.
    """
    named = engine_value(engine, "tokenizer")
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
            return token_ids(ids, f"{place}, prompt_token_ids").tolist()
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise ReadError(f"{place}: neither a text or a chat as prompt nor prompt_token_ids in it")
        if encoder is None:
            raise ReadError(
                f"{place}: it is text, and the model's folder has no tokenizer: give --prompts with prompt_token_ids, "
                "or --text"
            )
        place = f"{place}, prompt"
        return encoder.encode(prompt, place, special=True) if isinstance(prompt, str) else encoder.chat(prompt, place)

    if path is None:
        return [read({"prompt": question(n)}, f"{BUILT_IN}, prompt {n + 1}") for n in range(most)]
    if path.suffix not in (".jsonl", ".parquet"):
        raise ReadError(f"{path}: expected .jsonl or .parquet")
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    rows = json_rows(path, read) if path.suffix == ".jsonl" else map(read, *_table(path))
    prompts = list(itertools.islice(rows, most))
    if not prompts:
        raise ReadError(f"{path}: no prompts in it")
    return prompts


def check_texts(groups: list[Group], max_tokens: int, config: dict, engine: list[str], source: str) -> None:
    """Refuse prompts, or responses to be forced, that the model cannot take.

    Args:
        config: the model's config.json.
        engine: vLLM's engine arguments, as words of a command line.

    Raises:
        ValueError: a prompt that is empty or too long, or a token that the model does not know.
    """
    limit, vocabulary = longest_text(config, engine), config.get("vocab_size")
    for number, group in enumerate(groups, start=1):
        if not group.prompt:
            raise ValueError(f"{source}: prompt {number} is empty")
        if limit and group.longest_text(max_tokens) > limit:
            response = group.longest_text(max_tokens) - len(group.prompt)
            with_response = f"--max-tokens {max_tokens}" if group.responses is None else f"{response} of a response"
            raise ValueError(
                f"{source}: prompt {number} has {len(group.prompt)} tokens, with {with_response} that is more than "
                f"the {limit} that the model takes: shorten it, or set --max-tokens"
            )
        for tokens in (group.prompt, *(group.responses or [])) if vocabulary else []:
            if not 0 <= min(tokens) <= max(tokens) < vocabulary:
                unknown = next(token for token in tokens if not 0 <= token < vocabulary)
                place = f"prompt {number}" if tokens is group.prompt else f"a response to prompt {number}"
                raise ValueError(
                    f"{source}: {place} has token {unknown}, the model knows 0 to {vocabulary - 1}: it is of another "
                    "tokenizer than the model"
                )


def longest_text(config: dict, engine: list[str]) -> int | None:
    """Tokens of prompt and response together; None where only vLLM can tell, which checks again."""
    if (given := engine_value(engine, "max_model_len")) is not None:
        return int(given) if given.isdigit() else None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = rope.get("rope_type", rope.get("type", "default")) != "default"
    return None if stretched else config.get("max_position_embeddings")


def digest(groups: list[Group]) -> str:
    """A name of the tokens."""
    return hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16]


def question(number: int) -> str:
    """A built-in prompt; all are different."""
    a, b, c, d, e = 12 + number, 3 + 2 * (number % 50), 8 + number % 7, 14 + number % 11, 5 + number % 13
    return QUESTION.format(a=a, b=b, c=c, d=d, e=e)


def _table(path: Path) -> tuple[list[dict], list[str]]:
    """The rows of a .parquet file, and their places."""
    from pyarrow import parquet

    with one_line(str(path), "not a parquet file"):
        names = [name for name in ("prompt", "prompt_token_ids") if name in parquet.read_schema(path).names]
        rows = parquet.read_table(path, columns=names).to_pylist()
    return rows, [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
