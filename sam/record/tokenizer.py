"""A model's tokenizer and chat template: whole texts, whatever truncation or padding its files hold."""

import functools
from pathlib import Path
from typing import Any

from sam.reading import expect, json_object, one_line


class Tokenizer:
    """Turns text and chats into token ids; a ReadError says which `place` has a text that the files refuse.

    Text goes through tokenizer.json alone where there is one: transformers takes seconds to import. `source` is a
    model's folder, or a name that transformers knows.
    """

    def __init__(self, source: Path | str):
        self.source, self._file = source, Path(source) / "tokenizer.json"

    def encode(self, text: Any, place: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` as the model's own at its begin and end."""
        expect(isinstance(text, str), place, "a text", text)
        encoder = self.fast or self.whole
        with one_line(place, f"the tokenizer of {self.source} refuses the text"):
            found = encoder.encode(text, add_special_tokens=special)
        return found if isinstance(found, list) else found.ids

    def chat(self, messages: Any, place: str) -> list[int]:
        """Token ids of a chat as the chat template lays it out, up to where the response begins."""
        messages = checked_chat(messages, place)
        whole = self.whole
        with one_line(place, f"the chat template of {self.source} refuses it"):
            text = whole.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expect(bool(text), place, f"a prompt of the chat template of {self.source}", text)
        with one_line(place, f"the tokenizer of {self.source} refuses the text"):
            return whole.encode(text, add_special_tokens=False)

    @functools.cached_property
    def fast(self):
        """tokenizer.json by the library that reads it; None where there is none."""
        if not self._file.is_file():
            return None
        from tokenizers import Tokenizer as Fast

        with one_line(str(self._file), "not a tokenizer"):
            json_object(self._file)  # the library passes over a key that has no value
            fast = Fast.from_file(str(self._file))
            # A training call leaves its own in the file, and the library would go on cutting.
            fast.no_truncation()
            fast.no_padding()
        return fast

    @functools.cached_property
    def whole(self):
        """The tokenizer of transformers, which cuts and pads only where it is told to."""
        from transformers.utils import logging

        logging.set_verbosity_error()  # it warns of long texts, which are not its matter
        if self._file.is_file():
            from transformers import PreTrainedTokenizerFast as kind
        else:
            from transformers import AutoTokenizer as kind  # takes seconds longer to import
        with one_line(str(self.source), "not a tokenizer"):
            return kind.from_pretrained(self.source)


def checked_chat(messages: Any, place: str) -> list[dict]:
    """The messages of a chat, each with a role and with content or calls of tools; ReadError if they are not."""
    expect(isinstance(messages, list) and bool(messages), place, "a chat, a list of messages", messages)
    for number, message in enumerate(messages):
        is_message = isinstance(message, dict) and isinstance(role := message.get("role"), str) and bool(role)
        has_content = is_message and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
        expect(has_content, f"{place}[{number}]", "a message with role and content", message)
    return messages
