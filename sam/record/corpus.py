"""Texts that a drafter reads before its first request: `speculation.corpus`, and `sam replay --corpus`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sam.reading import ReadError, expect
from sam.record.responses import files_of, rows_of
from sam.record.tokenizer import Tokenizer

Text = tuple[np.ndarray, np.ndarray]  # a prompt and a response to it, int32 [length] each
COMPARED_TOKENS = 2048  # of each file of token ids, with what the tokenizer makes of their text
# Of these. Measured: samples of the tokenizer's own model at temperature 1.0 keep at least 0.95, ids of other
# tokenizers 0.26 to 0.93.
LEAST_KEPT = 0.94


def read_corpus(
    paths: Sequence[Path | str], most_tokens: int, tokenizer: str | None = None, vocabulary: int | None = None
) -> list[Text]:
    """Read responses with their prompts, of a folder those of the latest step first, until there are `most_tokens`.

    Args:
        paths: recordings, as sam.record.responses.read_recording takes them.
        tokenizer: folder or name of the model's, which files of text need; token ids are compared with it.
        vocabulary: token ids that the model knows, if that is known.

    Raises:
        ReadError: a file cannot be read, holds no response, or token ids of another tokenizer.
    """
    encoder = Tokenizer(tokenizer) if tokenizer is not None else None
    texts: list[Text] = []
    for path in paths:
        is_empty = True
        for file in reversed(files_of(Path(path))):
            read = []
            for prompt, response, _given in rows_of(file, encoder):
                if most_tokens <= 0:
                    break
                read.append((prompt, response[:most_tokens]))
                most_tokens -= len(response)
            responses = [response for _prompt, response in read]
            _check(file, responses, encoder, vocabulary)
            is_empty = is_empty and not read
            texts += read
        expect(not is_empty or most_tokens <= 0, str(path), "responses in it", "none")
    return texts


def _check(file: Path, responses: list[np.ndarray], encoder: Tokenizer | None, vocabulary: int | None) -> None:
    """Raise ReadError where a file's responses are not of the model's tokens."""
    tokens = np.concatenate([np.empty(0, np.int32), *responses])
    largest = int(tokens.max(initial=0))
    cause = "it is of another tokenizer than the model"
    if vocabulary is not None and largest >= vocabulary:
        raise ReadError(f"{file}: token {largest}, the model knows 0 to {vocabulary - 1}: {cause}")
    if encoder is not None and len(tokens):
        kept = encoder.share_kept(tokens[:COMPARED_TOKENS])
        if kept < LEAST_KEPT:
            figure = f"{kept:.0%} of its tokens are those that {encoder.source} makes of their text"
            raise ReadError(f"{file}: {figure}: {cause}")
