"""A model's tokenizer and chat template: whole texts, whatever truncation or padding its files hold."""

import difflib
from pathlib import Path
from typing import Any

import numpy as np

from sam.reading import expect, one_line


class Tokenizer:
    """Turns text and chats into token ids; a ReadError says which `place` has a text that the files refuse.

    `source` is a model's folder, or a name that transformers knows. `whole` is transformers' tokenizer, which cuts and
    pads only where it is told to.
    """

    def __init__(self, source: Path | str):
        from transformers.utils import logging

        logging.set_verbosity_error()  # it warns of long texts, which are not its matter
        if (Path(source) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as kind
        else:
            from transformers import AutoTokenizer as kind  # takes seconds longer to import
        self.source = source
        with one_line(str(source), "not a tokenizer"):
            self.whole = kind.from_pretrained(source)

    def encode(self, text: Any, place: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` as the model's own at its begin and end."""
        expect(isinstance(text, str), place, "a text", text)
        with one_line(place, f"the tokenizer of {self.source} refuses the text"):
            return self.whole.encode(text, add_special_tokens=special)

    def share_kept(self, tokens: np.ndarray) -> float:
        """Share of a text's tokens that it still has when it is decoded and encoded again: 1 for what the tokenizer
        itself has written, and little less for what its model has."""
        again = self.encode(self.whole.decode(tokens.tolist()), "a text decoded")
        matcher = difflib.SequenceMatcher(None, tokens.tolist(), again, autojunk=False)
        return sum(block.size for block in matcher.get_matching_blocks()) / max(1, len(tokens))

    def chat(self, messages: Any, place: str) -> list[int]:
        """Token ids of a chat as the chat template lays it out, up to where the response begins."""
        check_chat(messages, place)
        with one_line(place, f"the chat template of {self.source} refuses it"):
            text = self.whole.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(text, place)


def check_chat(messages: Any, place: str) -> None:
    """Raise ReadError unless it is a chat: messages, each with a role and with content or calls of tools."""
    expect(isinstance(messages, list) and bool(messages), place, "a chat, a list of messages", messages)
    for number, one in enumerate(messages):
        is_message = isinstance(one, dict) and bool(one.get("role"))
        has_content = is_message and (one.get("content") is not None or bool(one.get("tool_calls")))
        expect(has_content, f"{place}[{number}]", "a message with role and content", one)
