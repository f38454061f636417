"""A model's tokenizer and chat template: whole texts, whatever truncation or padding its files hold."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam.reading import ReadError, expect, one_line

if TYPE_CHECKING:
    import numpy as np  # words are checked before it is installed

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")  # the second has it as a key
PLAIN = [{"role": "user", "content": "zyx 87"}]  # a chat that any template takes, and no user's own


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
        files = [Path(source) / name for name in TEMPLATE_FILES]
        self._template_file = next((file for file in files if file.is_file()), None) or source
        with one_line(str(self._template_file), "not a chat template"):
            if self._template_file in files:
                self._template_file.read_text(encoding="utf-8")
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
        plain = self._plain
        with one_line(place, f"the chat template of {self.source} refuses it"):
            text = self._laid_out(messages)
        if text == plain:
            raise ReadError(f"{self._template_file}: not a chat template (it leaves out what messages say)")
        return self.encode(text, place)

    def _laid_out(self, messages: list[dict[str, Any]]) -> str:
        return self.whole.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    @functools.cached_property
    def _plain(self) -> str | None:
        """PLAIN laid out, None where the template asks for more in its own words; ReadError: it is none."""
        from jinja2 import TemplateError

        with one_line(str(self._template_file), "not a chat template"):
            try:
                return self._laid_out(PLAIN)
            except TemplateError as error:
                if type(error) is TemplateError:  # what raise_exception of a template raises; others are of Jinja
                    return None
                raise


def check_chat(messages: Any, place: str) -> None:
    """Raise ReadError unless it is a chat: messages, each with a role and with content or calls of tools."""
    expect(isinstance(messages, list) and bool(messages), place, "a chat, a list of messages", messages)
    for number, message in enumerate(messages):
        is_message = isinstance(message, dict) and bool(message.get("role"))
        has_content = is_message and (message.get("content") is not None or bool(message.get("tool_calls")))
        expect(has_content, f"{place}[{number}]", "a message with role and content", message)
