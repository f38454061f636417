"""What a request tells the drafters of its engine, in SamplingParams.extra_args: no token depends on it."""

from dataclasses import dataclass
from typing import Any, Self

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
