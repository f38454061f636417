"""Baselines: other drafters with the interface of sam.drafting.drafter.Drafter, to be replayed beside it.

`ngram` and `suffix` are the installed packages' own code; `suffix-any` is `suffix` without its
limits on a draft's length and probability, which accepts most. `first-occurrence` is the drafter of the published
recipe (cann-recipes-train, llm_rl/qwen3), which drafts the tokens that followed the first occurrence of a request's
longest repeated suffix.
"""

import sys
from pathlib import Path

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.reading import expect
from sam.replay.stepwise import StepwiseDrafter
from sam.vllm.bench.baselines import prompt_lookup

HISTORY_TOKENS = 4 << 20  # with scope=history, enough for any recording here
NAMES = ("sam", "first-occurrence", "ngram", "suffix", "suffix-any")


def make_drafter(
    name: str,
    scope: str,
    draft_length: int,
    corpus: Path | None = None,
    cross_prompt: bool = SpeculationConfig.cross_prompt,
):
    """Build a drafter by its name, one of NAMES.

    Args:
        scope: request, group or history: whose tokens it drafts from.
        draft_length: draft tokens of a request at most.
        corpus: file of sam.corpus, used by sam alone.
        cross_prompt: whether sam remembers other prompts.

    Raises:
        ValueError: unknown name, or its package is not installed.
    """
    if name == "sam":
        limits = {"history_tokens": HISTORY_TOKENS, "corpus": corpus, "cross_prompt": cross_prompt}
        drafter = Drafter(max_draft_tokens=draft_length, scope=scope, **limits)
        drafter.warm_up()
        return drafter
    if name == "first-occurrence":
        return FirstOccurrence()
    try:
        if name == "ngram":
            return Ngram()
        if name in ("suffix", "suffix-any"):
            limits = {} if name == "suffix" else {"max_spec_factor": 100.0, "min_token_prob": 0.0}
            return Suffix(group=scope != "request", **limits)
    except ImportError as error:
        raise ValueError(f"drafter {name}: {error}; install requirements/cpu.txt and requirements/peers.txt") from error
    raise ValueError(f"drafter {name!r}: expected one of {', '.join(NAMES)}")


class FirstOccurrence(StepwiseDrafter):
    """The published recipe's drafter, of each request by itself: what followed the longest repeated suffix at first."""

    def __init__(self):
        super().__init__()
        # A character for each token, so that strings' own search finds the suffix; and the suffix's length.
        self._strings: dict[str, tuple[str, int]] = {}

    def start(self, request_id, prompt, policy_version=0):
        super().start(request_id, prompt)
        self._strings[request_id] = "", 0
        self._match(request_id, prompt)

    def add(self, request_id, tokens):
        super().add(request_id, tokens)
        self._match(request_id, tokens)

    def _match(self, request_id: str, tokens: np.ndarray) -> None:
        string, length = self._strings[request_id]
        for token in tokens.tolist():
            expect(token <= sys.maxunicode, f"{request_id}, first-occurrence", f"token ids to {sys.maxunicode}", token)
            string += chr(token)
            length += 1  # a token makes the repeated suffix longer by itself at most
            while string.find(string[len(string) - length :], 0, len(string) - 1) < 0:
                length -= 1
        self._strings[request_id] = string, length

    def propose(self, request_id, text, budget):
        string, length = self._strings[request_id]
        start = string.find(string[len(string) - length :]) + length
        return text[start : start + budget] if length else text[:0]

    def finish(self, request_id):
        super().finish(request_id)
        del self._strings[request_id]


class Ngram(StepwiseDrafter):
    """vLLM's prompt lookup with this project's default lengths."""

    SHORTEST, LONGEST = SpeculationConfig.prompt_lookup_min, SpeculationConfig.prompt_lookup_max
    MAX_MODEL_LEN = 1 << 30

    def __init__(self):
        super().__init__()
        self._propose = prompt_lookup()

    def propose(self, request_id, text, budget):
        return self._propose(text, self.SHORTEST, self.LONGEST, self.MAX_MODEL_LEN, budget)


class Suffix(StepwiseDrafter):
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH = 24

    def __init__(self, group: bool, max_spec_factor: float = 1.0, min_token_prob: float = 0.1):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        super().__init__()
        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if group else 0)
        self._limits = {"max_spec_factor": max_spec_factor, "min_token_prob": min_token_prob}

    def start(self, request_id, prompt, policy_version=0):
        super().start(request_id, prompt)
        self._cache.start_request(request_id, prompt)

    def add(self, request_id, tokens):
        super().add(request_id, tokens)
        if len(tokens):
            self._cache.add_active_response(request_id, tokens.tolist())

    def propose(self, request_id, text, budget):
        return self._cache.speculate(request_id, text[-self.DEPTH :], max_spec_tokens=budget, **self._limits).token_ids

    def finish(self, request_id):
        super().finish(request_id)
        self._cache.stop_request(request_id)
