"""Prompts as token ids: from a file or built in, checked against the model before an engine starts."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from sam.bench.settings import engine_value

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


def read_prompts(path: Path | None, model: Path, needed: int) -> list[list[int]]:
    """Token ids of a file's prompts, or of `needed` built-in ones.

    Args:
        path: .jsonl with `prompt` (text, or messages of a chat) or `prompt_token_ids` in each line, or .parquet with a
            column of either name, as recipe.data writes it; None for built-in prompts.
        model: folder whose tokenizer turns text into tokens.

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
    return _token_ids(rows, str(path or BUILT_IN), model)


def check_lengths(prompts: list[list[int]], max_tokens: int, config: dict, engine: list[str], source: str) -> None:
    """Refuse prompts that the model cannot take together with a response.

    Args:
        config: the model's config.json.
        engine: vLLM's engine arguments, as words of a command line.

    Raises:
        ValueError: a prompt that is empty or too long, or a token that the model does not know.
    """
    config = config | config.get("text_config", {})
    limit, vocabulary = longest_text(config, engine), config.get("vocab_size")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"{source}: prompt {number} is empty")
        if limit and len(prompt) + max_tokens > limit:
            raise ValueError(
                f"{source}: prompt {number} has {len(prompt)} tokens, with --max-tokens {max_tokens} that is more than "
                f"the {limit} that the model takes"
            )
        if vocabulary and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            unknown = next(token for token in prompt if not 0 <= token < vocabulary)
            raise ValueError(f"{source}: prompt {number} has token {unknown}, the model knows 0 to {vocabulary - 1}")


def longest_text(config: dict, engine: list[str]) -> int | None:
    """Tokens of prompt and response together; None where only vLLM can tell, which checks again."""
    if (given := engine_value(engine, "max_model_len")) is not None:
        return int(given) if given.isdigit() else None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = rope.get("rope_type", rope.get("type", "default")) != "default"
    return None if stretched else config.get("max_position_embeddings")


def digest(prompts: list[list[int]]) -> str:
    """A name of the prompts' tokens."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


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


def _token_ids(rows: list[dict], source: str, model: Path) -> list[list[int]]:
    encoded, tokenizer = [], None
    for number, row in enumerate(rows, start=1):
        if _are_token_ids(ids := row.get("prompt_token_ids")):
            encoded.append(ids)
            continue
        prompt = row.get("prompt")
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if not isinstance(prompt, str) and not is_chat:
            raise ValueError(f"{source}: prompt {number} has neither a text or a chat as prompt nor prompt_token_ids")
        tokenizer = tokenizer or _Tokenizer(model)
        encoded.append(tokenizer.chat(prompt) if is_chat else tokenizer.text(prompt))
    return encoded


def _are_token_ids(value) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


class _Tokenizer:
    """The model's tokenizer; text goes through tokenizer.json alone where there is one: transformers takes seconds."""

    def __init__(self, model: Path):
        self._model, self._file = model, model / "tokenizer.json"
        if not list(model.glob("*token*")):
            raise ValueError(f"{model}: no tokenizer there for prompts of text; give --prompts with prompt_token_ids")

    def text(self, prompt: str) -> list[int]:
        return self._fast.encode(prompt).ids if self._file.is_file() else self._whole.encode(prompt)

    def chat(self, messages: list[dict]) -> list[int]:
        return self._whole.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    @functools.cached_property
    def _fast(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))

    @functools.cached_property
    def _whole(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)
