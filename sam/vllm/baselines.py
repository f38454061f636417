"""vLLM's own model-free drafters, request by request, and its rejection sampler, to compare with."""

from __future__ import annotations

import importlib
import os

import numpy as np

from sam.config import SpeculationConfig


class Ngram:
    """vLLM's prompt lookup with this project's default lengths."""

    SHORTEST, LONGEST = SpeculationConfig.prompt_lookup_min, SpeculationConfig.prompt_lookup_max
    MAX_MODEL_LEN = 1 << 30

    def __init__(self):
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._propose = _find_longest_matched_ngram_and_propose_tokens
        self._texts: dict[str, tuple[np.ndarray, int]] = {}

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        """Track a request; `prompt` is int [length]."""
        self._texts[request_id] = (np.array(prompt, dtype=np.int32), len(prompt))

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append the tokens of a step to a request."""
        self._texts[request_id] = _appended(*self._texts[request_id], tokens)

    def propose(self, request_id: str, budget: int) -> np.ndarray:
        """Draft at most `budget` tokens."""
        buffer, used = self._texts[request_id]
        return self._propose(buffer[:used], self.SHORTEST, self.LONGEST, self.MAX_MODEL_LEN, budget)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        del self._texts[request_id]


class Suffix:
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH = 24

    def __init__(self, group: bool, max_spec_factor: float = 1.0, min_token_prob: float = 0.1):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if group else 0)
        self._limits = {"max_spec_factor": max_spec_factor, "min_token_prob": min_token_prob}
        self._texts: dict[str, tuple[np.ndarray, int]] = {}

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        """Track a request; `prompt` is int [length]."""
        self._cache.start_request(request_id, prompt)
        self._texts[request_id] = (np.array(prompt, dtype=np.int32), len(prompt))

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append the tokens of a step to a request."""
        if len(tokens):
            self._texts[request_id] = _appended(*self._texts[request_id], tokens)
            self._cache.add_active_response(request_id, tokens.tolist())

    def propose(self, request_id: str, budget: int) -> list[int]:
        """Draft at most `budget` tokens."""
        buffer, used = self._texts[request_id]
        draft = self._cache.speculate(
            request_id,
            buffer[max(0, used - self.DEPTH) : used],
            max_spec_tokens=budget,
            **self._limits,
        )
        return draft.token_ids

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._cache.stop_request(request_id)
        del self._texts[request_id]


def _appended(buffer: np.ndarray, used: int, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    if used + len(tokens) > len(buffer):
        buffer = np.concatenate([buffer[:used], np.empty(used + len(tokens) + 1024, np.int32)])
    buffer[used : used + len(tokens)] = tokens
    return buffer, used + len(tokens)


class _KnownArguments:
    """A kernel of vLLM's CPU backend, without the argument of its caller that it does not know (a TypeError)."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            keywords.pop("USE_FP64_GUMBEL", None)
            return self.kernel[grid](*arguments, **keywords)

        return launch


def stock_rejection_sample(device: str):
    """vLLM's own `rejection_sample`, for `python -m sam.verify bench`.

    Sets vLLM's log level: it logs to stdout, where the figures go.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    module = importlib.import_module("vllm.v1.sample.rejection_sampler")
    if device == "cpu":  # as CPUModelRunner binds them
        from vllm.platforms import current_platform
        from vllm.utils import cpu_triton_utils

        current_platform.import_kernels()
        for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
            setattr(module, f"{name}_kernel", _KnownArguments(getattr(cpu_triton_utils, f"{name}_kernel")))
    return module.rejection_sample
