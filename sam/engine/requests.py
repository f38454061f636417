"""What an engine's requests bring: hints to the drafters in SamplingParams.extra_args, on which no token depends; their
texts; and the tokens of a step."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

PREFIX = "sam_"  # of the keys


@dataclass(frozen=True)
class RequestHints:
    """The hints of one request; None where it gives none."""

    # Of a request that continues a response or may be continued by another one, tokens of the response's own prompt; of
    # a later turn those of the conversation's first prompt.
    prompt_tokens: int | None = None
    response_limit: int | None = None  # tokens that this response may have at most
    turn: int | None = None  # of the conversation, from 1

    def extra_args(self) -> dict[str, int]:
        """As a request carries them."""
        return {PREFIX + name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of(cls, sampling_params: Any) -> Self:
        """Those that vLLM's SamplingParams carry; none of a request without them."""
        given = getattr(sampling_params, "extra_args", None) or {}
        return cls(*(given.get(PREFIX + name) for name in cls.__dataclass_fields__))


def turn_of(state) -> int:
    """Of a request, by vLLM's state of it: which turn of its conversation it is, from 1."""
    return (getattr(state.sampling_params, "extra_args", None) or {}).get(f"{PREFIX}turn", 1)


def response_start(state) -> int:
    """Tokens of a request's text before its response, by vLLM's state of it: of a continued one, of the first part."""
    prompt_tokens = RequestHints.of(state.sampling_params).prompt_tokens
    return state.num_prompt_tokens if prompt_tokens is None else min(prompt_tokens, state.num_prompt_tokens)


def response_of(state) -> list[int]:
    """The tokens of a request's response: those that its prompt ends with, if it continues one, and its own."""
    start = response_start(state)
    given = state.prompt_token_ids[start:] if start < state.num_prompt_tokens else []
    return [*given, *state.output_token_ids]


def is_continued(state) -> bool:
    """Whether the response of a request that is gone goes on in another one, since none of its tokens ends a response:
    a part that has all the tokens that it asked for, and fewer than the response may have; and, where there is no such
    limit, a response that may be continued and was aborted, but by a string that ends it: the engine cannot tell.
    """
    parameters = state.sampling_params
    hints = RequestHints.of(parameters)
    if hints.prompt_tokens is None:
        return False
    tokens = state.output_token_ids[: parameters.max_tokens]  # drafts behind the end may have been verified too
    if not parameters.all_stop_token_ids.isdisjoint(tokens):
        return False
    has_all = len(tokens) == parameters.max_tokens
    if hints.response_limit is None:
        return not has_all and not parameters.stop
    has_more = state.num_prompt_tokens - response_start(state) + len(tokens) < hints.response_limit
    return has_all and has_more and min(tokens) >= 0


@dataclass
class Step:
    """What a step brought, or will have brought once its tokens have come to the host."""

    request_ids: list[str]  # of its rows
    emits: np.ndarray  # bool [rows], False for a row that is still in its prompt
    context: float  # mean tokens of its rows' texts
    had_drafts: bool
    tokens: np.ndarray  # int [rows, 1 + longest draft], on the host once `copied` is over
    # int [rows], tokens of each row that are kept, likewise; 0 for a row still in its prompt. None until it is `read`:
    # those that are no padding, which is negative.
    counts: np.ndarray | None
    copied: Any  # event of the copies of both; None: they are on the host
    verified: np.ndarray | None = None  # int [rows], draft tokens of each; None where nobody asks
    max_num_tokens_other_dp_ranks: int = 0  # as of sam.switch.step_cost.StepState

    def read(self) -> None:
        """Wait for its tokens."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.counts is None:
            self.counts = (self.tokens >= 0).sum(axis=1) * self.emits


@dataclass
class Text:
    """A request's text so far; `sampling_params` are vLLM's."""

    sampling_params: Any
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    _array: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    _converted: int = 0  # tokens that are in it

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def behind(self, place: int) -> list[int]:
        """Tokens from a place on."""
        begin = self.num_prompt_tokens
        return self.prompt_token_ids[place:] + self.output_token_ids[max(0, place - begin) :]

    def array(self) -> np.ndarray:
        """int32 [length]; what was asked for before is not converted again."""
        if len(self) > len(self._array):
            self._array = np.resize(self._array, 2 * len(self))
        self._array[self._converted : len(self)] = self.behind(self._converted)
        self._converted = len(self)
        return self._array[: len(self)]


def accepted_tokens(emitted: int, verified: int) -> int:
    """Draft tokens accepted by `verified` verifications that emitted `emitted` tokens: each adds one of the model's own
    (Leviathan et al., arXiv 2211.17192). A step without drafts counts as a verification that accepts none."""
    return emitted - verified
