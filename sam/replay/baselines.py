"""Baselines: other drafters with the interface of sam.drafting.drafter.Drafter, to be replayed beside it.

`ngram` and `suffix` are the installed packages' own code. `first-occurrence` is the drafter of the published recipe
(cann-recipes-train, llm_rl/qwen3), which drafts the tokens that followed the first occurrence of a request's longest
repeated suffix.
"""

import sys
from pathlib import Path

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.drafts import Drafts
from sam.reading import expect
from sam.vllm.bench.baselines import prompt_lookup

HISTORY_TOKENS = 4 << 20  # with scope=history, enough for any recording here
NAMES = ("sam", "first-occurrence", "ngram", "suffix")


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
    if name not in NAMES:
        raise ValueError(f"drafter {name!r}: expected one of {', '.join(NAMES)}")
    try:
        return {"first-occurrence": FirstOccurrence, "ngram": Ngram, "suffix": Suffix}[name](scope != "request")
    except ImportError as error:
        raise ValueError(f"drafter {name}: {error}; install requirements/cpu.txt and requirements/peers.txt") from error


class Stepwise:
    """A drafter of one request at a time behind the interface of sam.drafting.drafter.Drafter; `in_group` as a
    subclass's, which has `propose(request_id, budget)`: up to `budget` tokens to follow the request's text."""

    nbytes = 0

    def __init__(self, in_group: bool):
        self._texts: dict[str, tuple[np.ndarray, int]] = {}  # a buffer, and how much of it is used

    def text(self, request_id: str) -> np.ndarray:
        """int32 [length], a request's prompt and tokens."""
        buffer, used = self._texts[request_id]
        return buffer[:used]

    def start(self, request_id: str, prompt: np.ndarray, policy_version: int = 0) -> None:
        """Start to follow a request, whatever the version of the weights."""
        self._texts[request_id] = np.array(prompt, dtype=np.int32), len(prompt)

    def append(self, request_ids, token_ids, offsets) -> None:
        """Show the drafter the requests' new tokens."""
        for row, request_id in enumerate(request_ids):
            self.add(request_id, token_ids[offsets[row] : offsets[row + 1]])

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append a request's new tokens."""
        buffer, used = self._texts[request_id]
        if used + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer[:used], np.empty(used + len(tokens) + 1024, np.int32)])
        buffer[used : used + len(tokens)] = tokens
        self._texts[request_id] = buffer, used + len(tokens)

    def draft(self, request_ids, budgets) -> Drafts:
        """Draft up to budgets[i] tokens for request i."""
        pairs = zip(request_ids, budgets.tolist(), strict=True)
        drafts = [np.asarray(self.propose(name, budget), dtype=np.int32) for name, budget in pairs]
        bounds, flat = np.cumsum([0, *map(len, drafts)]), np.concatenate([np.empty(0, np.int32), *drafts])
        return Drafts(flat, bounds, np.ones(len(flat), np.float32), np.zeros(len(drafts), np.int32))

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        del self._texts[request_id]


class FirstOccurrence(Stepwise):
    """The published recipe's drafter, of each request by itself: what followed the longest repeated suffix at first."""

    def __init__(self, in_group: bool):
        super().__init__(in_group)
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

    def propose(self, request_id, budget):
        string, length = self._strings[request_id]
        start = string.find(string[len(string) - length :]) + length
        return self.text(request_id)[start : start + budget] if length else []


class Ngram(Stepwise):
    """vLLM's prompt lookup with this project's default lengths."""

    SHORTEST, LONGEST = SpeculationConfig.prompt_lookup_min, SpeculationConfig.prompt_lookup_max
    MAX_MODEL_LEN = 1 << 30

    def __init__(self, in_group: bool):
        super().__init__(in_group)
        self._propose = prompt_lookup()

    def propose(self, request_id, budget):
        return self._propose(self.text(request_id), self.SHORTEST, self.LONGEST, self.MAX_MODEL_LEN, budget)


class Suffix(Stepwise):
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH, LIMITS = 24, {"max_spec_factor": 1.0, "min_token_prob": 0.1}

    def __init__(self, in_group: bool):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        super().__init__(in_group)
        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if in_group else 0)

    def start(self, request_id, prompt, policy_version=0):
        super().start(request_id, prompt)
        self._cache.start_request(request_id, prompt)

    def add(self, request_id, tokens):
        super().add(request_id, tokens)
        if len(tokens):
            self._cache.add_active_response(request_id, tokens.tolist())

    def propose(self, request_id, budget):
        end = self.text(request_id)[-self.DEPTH :]
        return self._cache.speculate(request_id, end, max_spec_tokens=budget, **self.LIMITS).token_ids

    def finish(self, request_id):
        super().finish(request_id)
        self._cache.stop_request(request_id)
