"""What requests are asked, as token ids, and which of them start together: prompts from a file or built in, or a
recording with the responses to them.

All of it is compared with the model before an engine starts.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

from sam.reading import ReadError, expect, json_object, json_rows, parquet_rows, token_ids
from sam.record.responses import read_recording
from sam.record.tokenizer import Tokenizer
from sam.tools.bench.settings import Settings

QUESTION = (
    "A workshop makes {chairs} chairs and {tables} tables a day. A chair needs {of_chair} screws and a table needs "
    "{of_table}. How many screws does the workshop need in {days} days? Think step by step.\n"
)
WARM_UP = 0  # the round that is not counted, one batch of each load
Place = tuple[int, int]  # a round, from 1, and a load's number
Batches = list[list[dict[str, Any]]]  # of requests that start together


class PromptGroup(NamedTuple):
    """A prompt and, where the text is forced, the responses that its requests emit, as token ids."""

    prompt: list[int]
    responses: list[list[int]] | None = None


def read_prompts(path: Path | None, tokenizer: Path | None, most: int | None = None) -> list[list[int]]:
    """Token ids of a file's prompts, the first `most` of them, or of `most` built-in ones.

    Args:
        path: .jsonl with `prompt` (text, or messages of a chat) or `prompt_token_ids` in each line, or .parquet with a
            column of either name, as recipe.sam_dapo.data writes it; None for built-in prompts.
        tokenizer: folder of what turns text into tokens, or None.

    Raises:
        ReadError: no such file, another format, no prompt in it, or text without a tokenizer.
    """
    encoder = Tokenizer(tokenizer) if tokenizer is not None else None

    def read(row: dict, place: str) -> list[int]:
        ids = row.get("prompt_token_ids")
        if ids is not None:
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
        return [read({"prompt": question(n)}, f"the built-in prompts, prompt {n + 1}") for n in range(most)]
    if path.suffix not in (".jsonl", ".parquet"):
        raise ReadError(f"{path}: expected .jsonl or .parquet")
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    rows = json_rows(path, read) if path.suffix == ".jsonl" else parquet_rows(path, read)
    prompts = list(itertools.islice(rows, most))
    expect(bool(prompts), str(path), "prompts in it", "none")
    return prompts


def question(number: int) -> str:
    """A built-in prompt; all are different."""
    return QUESTION.format(
        chairs=12 + number,
        tables=3 + 2 * (number % 50),
        of_chair=8 + number % 7,
        of_table=14 + number % 11,
        days=5 + number % 13,
    )


def read_groups(
    path: Path, tokenizer: Path | None, size: int, max_tokens: int | None = None
) -> tuple[list[PromptGroup], list[str]]:
    """Groups of `size` responses of a recording, those of different prompts first, and what to know of them.

    Args:
        path: a recording's file, or a run directory.
        tokenizer: folder, for recordings of text.
        max_tokens: of a response; what follows is cut off. None: responses are whole.

    Raises:
        ValueError: it cannot be read, or has no prompt with enough responses.
    """
    recording = read_recording(path, None if tokenizer is None else str(tokenizer))
    recording.check_generated(path)
    pieces: list[tuple[int, PromptGroup]] = []
    largest = short = 0
    for prompt, samples in zip(recording.prompts, recording.responses, strict=True):
        responses = [response[:max_tokens].tolist() for response in samples if len(response)]
        largest = max(largest, len(responses))
        short += len(responses) < size
        for first in range(0, len(responses) - size + 1, size):
            pieces.append((first, PromptGroup(prompt.tolist(), responses[first : first + size])))
    if not pieces:
        raise ValueError(
            f"{path}: its largest group has {largest} responses, --samples needs {size}: set it to {largest} or less"
        )
    notes = []
    if short:
        notes.append(f"{short} of {len(recording.prompts)} prompts have fewer than {size} responses and are left out")
    return [group for _, group in sorted(pieces, key=lambda piece: piece[0])], notes


def read_input(settings: Settings, tokenizer: Path | None) -> tuple[dict[Place, Batches], list[str]]:
    """The requests of a measurement, as `batches_of` gives them, and what to know of them.

    Raises:
        ValueError: they cannot be read, are too few, or have a token that the model does not know.
    """
    source = settings.text or settings.prompts
    needed = 0
    for requests in settings.requests:
        groups_of_batch = -(-requests // settings.samples)
        batches_of_round = -(-settings.responses // requests)
        needed += groups_of_batch * (1 + settings.rounds * batches_of_round)
    if settings.text:
        size = min(settings.samples, max(settings.requests))
        groups, notes = read_groups(settings.text, tokenizer, size, settings.max_tokens)
    else:
        prompts = read_prompts(settings.prompts, tokenizer, None if settings.prompts else needed)
        groups = [PromptGroup(prompt) for prompt in prompts]
        notes = []
    vocabulary = vocabulary_of(settings.model)
    largest = max(max(tokens) for group in groups for tokens in (group.prompt, *(group.responses or [])))
    if vocabulary is not None and largest >= vocabulary:
        knows = f"the model knows 0 to {vocabulary - 1}: it is of another tokenizer than the model"
        raise ValueError(f"{source}: token {largest}, {knows}")
    if len(groups) < needed:
        lack = f"{source} has {len(groups)} groups, all rounds need {needed}"
        raise ValueError(f"{lack}, so that none comes again: give more, or lower --rounds or --requests")
    return batches_of(settings, groups), notes


def vocabulary_of(model: Path) -> int | None:
    """Token ids that the model in a folder knows, None if it does not say; ReadError: it says no number."""
    path = model / "config.json"
    config = json_object(path)
    text = config.get("text_config") or {}  # of models that read pictures too
    expect(isinstance(text, dict), f"{path}, text_config", "a JSON object", text)
    size = {**config, **text}.get("vocab_size")
    expect(size is None or type(size) is int, f"{path}, vocab_size", "a number", size)
    return size


def batches_of(settings: Settings, groups: list[PromptGroup]) -> dict[Place, Batches]:
    """The requests of each round and load, by batch: `prompt_token_ids`, `seed` and `response` (to be forced) of each.

    A prompt has `samples` requests, the last one of a batch what is left; a counted round as many batches as give
    `responses`. Every batch has other groups and other seeds, so that no drafter meets a response that it has seen
    before. All variants get the same.
    """
    left = iter(groups)
    seeds = itertools.count()
    places: dict[Place, Batches] = {}

    def batch_of(requests: int) -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = []
        while len(batch) < requests:
            size = min(settings.samples, requests - len(batch))
            prompt, responses = next(left)
            for response in (responses or [None] * size)[:size]:
                seed = next(seeds) if settings.seeds else None
                batch.append({"prompt_token_ids": prompt, "seed": seed, "response": response})
        return batch

    for round_ in range(settings.rounds + 1):
        for load, requests in enumerate(settings.requests):
            batches = 1 if round_ == WARM_UP else -(-settings.responses // requests)
            places[round_, load] = [batch_of(requests) for _ in range(batches)]
    return places
