"""Prompts as token ids: from a file or built in, checked against the model before an engine starts."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from sam.bench.loads import Group
from sam.bench.settings import engine_value
from sam.config import WITH_DRAFT_MODEL
from sam.trained_drafter import wrong_kind

QUESTION = (
    "A workshop makes {a} chairs and {b} tables a day. A chair needs {c} screws and a table needs {d}. "
    "How many screws does the workshop need in {e} days? Think step by step.\n"
)
BUILT_IN = "the built-in prompts"


def model_config(model: Path) -> dict[str, Any]:
    """config.json of a model's folder.

    Raises:
        ValueError: there is none.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ValueError(f"{model}: no config.json there; expected the folder of a model")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


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
    sizes = [one.get("vocab_size", one.get("text_config", {}).get("vocab_size")) for one in (own, config)]
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


def read_prompts(path: Path | None, tokenizer: Path | None, needed: int) -> list[list[int]]:
    """Token ids of a file's prompts, or of `needed` built-in ones.

    Args:
        path: .jsonl with `prompt` (text, or messages of a chat) or `prompt_token_ids` in each line, or .parquet with a
            column of either name, as recipe.data writes it; None for built-in prompts.
        tokenizer: folder of what turns text into tokens, or None.

    Raises:
        ValueError: no such file, another format, no prompt in it, or text without a tokenizer.
    """
    if path is None:
        rows = [{"prompt": question(number)} for number in range(needed)]
    elif path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: expected .jsonl or .parquet")
    elif not path.is_file():
        raise ValueError(f"{path}: no such file")
    else:
        rows = _lines(path) if path.suffix == ".jsonl" else _table(path)
    if not rows:
        raise ValueError(f"{path}: no prompts in it")
    return _token_ids(rows, str(path or BUILT_IN), tokenizer)


def check_texts(groups: list[Group], max_tokens: int, config: dict, engine: list[str], source: str) -> None:
    """Refuse prompts, or responses to be forced, that the model cannot take.

    Args:
        config: the model's config.json.
        engine: vLLM's engine arguments, as words of a command line.

    Raises:
        ValueError: a prompt that is empty or too long, or a token that the model does not know.
    """
    config = config | config.get("text_config", {})
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


def _lines(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if row is not None:
            rows.append(row if isinstance(row, dict) else {})
    return rows


def _table(path: Path) -> list[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from error
    return table.select([name for name in ("prompt", "prompt_token_ids") if name in table.column_names]).to_pylist()


def _token_ids(rows: list[dict], source: str, folder: Path | None) -> list[list[int]]:
    encoded, tokenizer = [], None
    for number, row in enumerate(rows, start=1):
        if _are_token_ids(ids := row.get("prompt_token_ids")):
            encoded.append(ids)
            continue
        prompt = row.get("prompt")
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if not isinstance(prompt, str) and not is_chat:
            raise ValueError(f"{source}: prompt {number} has neither a text or a chat as prompt nor prompt_token_ids")
        if folder is None:
            raise ValueError(
                f"{source}: prompt {number} is text, and the model's folder has no tokenizer: give --prompts with "
                "prompt_token_ids, or --text"
            )
        tokenizer = tokenizer or _Tokenizer(folder)
        encoded.append(tokenizer.chat(prompt) if is_chat else tokenizer.text(prompt))
    return encoded


def _are_token_ids(value) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


class _Tokenizer:
    """The model's tokenizer; text goes through tokenizer.json alone where there is one: transformers takes seconds."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, folder / "tokenizer.json"

    def text(self, prompt: str) -> list[int]:
        return self._fast.encode(prompt).ids if self._file.is_file() else self._whole.encode(prompt)

    def chat(self, messages: list[dict]) -> list[int]:
        return self._whole.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    @functools.cached_property
    def _fast(self):
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library has no class of its own
            raise ValueError(f"{self._file}: not a tokenizer ({error})") from error

    @functools.cached_property
    def _whole(self):
        from transformers.utils import logging

        logging.set_verbosity_error()  # it warns of long texts, which are refused here
        if self._file.is_file():
            from transformers import PreTrainedTokenizerFast as kind
        else:
            from transformers import AutoTokenizer as kind  # takes seconds longer to import
        try:
            return kind.from_pretrained(self._folder)
        except (ValueError, OSError, KeyError) as error:
            raise ValueError(f"{self._folder}: not a tokenizer ({' '.join(str(error).split())})") from error
