"""One response as text: accepted drafts in colour, positions where a draft was rejected marked."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sam.record.tokenizer import Tokenizer

LONGEST = 1500  # tokens of a response that are shown
STYLE = """
.response{white-space:pre-wrap;overflow-wrap:anywhere;font:15px/1.7 ui-monospace,monospace;max-width:60rem;
background:#fafafa;padding:.8rem 1rem}
.accepted{background:#c9ebdf}.rejected{border-bottom:2px solid #D55E00}.response span{cursor:default}
"""


class Token(NamedTuple):
    """A token of a response.

    Attributes:
        id: of the token.
        accepted: whether it was an accepted draft token.
        rejected: the draft that was rejected at its place, from the token that differs on; empty where none was.
    """

    id: int
    accepted: bool
    rejected: tuple[int, ...]


def tokens_of(steps: list[tuple[list[int], list[int]]], length: int) -> list[Token]:
    """A response's first `length` tokens, from each step's verified draft and the tokens that came out of it.

    Example:
        >>> tokens_of([([], [5]), ([6, 9, 8], [6, 7]), ([8], [8, 4])], 5)[1:3]
        [Token(id=6, accepted=True, rejected=()), Token(id=7, accepted=False, rejected=(9, 8))]
    """
    tokens: list[Token] = []
    for draft, emitted in steps:
        *accepted, last = emitted
        tokens += [Token(token, True, ()) for token in accepted]
        tokens.append(Token(last, False, tuple(draft[len(accepted) :])))
    return tokens[:length]


def decoder(tokenizer: Path | None) -> Callable[[list[int]], list[str]]:
    """A function that gives the text of each token of a response; token ids where there is no tokenizer.json."""
    if tokenizer is None or (known := Tokenizer(tokenizer).fast) is None:
        return lambda ids: [f"{token} " for token in ids]
    from tokenizers.decoders import DecodeStream

    def decode(ids: list[int]) -> list[str]:
        # A character may take several tokens: all but the last of them have no text.
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(known, token) or "" for token in ids]

    return decode


def as_html(tokens: list[Token], decode: Callable[[list[int]], list[str]]) -> str:
    """The response; over a marked place a reader sees the draft that was rejected there."""
    spans = []
    for token, text in zip(tokens[:LONGEST], decode([token.id for token in tokens[:LONGEST]]), strict=True):
        if token.accepted:
            spans.append(f"<span class='accepted'>{html.escape(text)}</span>")
        elif token.rejected:
            draft = html.escape("draft: " + "".join(decode(list(token.rejected))), quote=True)
            spans.append(f"<span class='rejected' title='{draft}'>{html.escape(text)}</span>")
        else:
            spans.append(html.escape(text))
    more = f"<p>{len(tokens) - LONGEST} more tokens are not shown.</p>" if len(tokens) > LONGEST else ""
    return f"<div class='response'>{''.join(spans)}</div>{more}"


def summary(tokens: list[Token]) -> str:
    """What the colours mean, and the counts."""
    accepted = sum(token.accepted for token in tokens)
    rejected = sum(bool(token.rejected) for token in tokens)
    return (
        f"{len(tokens)} tokens of one request. Green: {accepted} accepted draft tokens, which needed no step of their "
        f"own. Underlined: {rejected} tokens of the model where it rejected a draft; hold the pointer over one to see "
        "the draft."
    )
