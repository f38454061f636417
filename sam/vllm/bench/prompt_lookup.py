"""vLLM's own prompt lookup, for `sam replay`."""

import functools
import inspect
from types import SimpleNamespace

from vllm.v1.spec_decode.ngram_proposer import NgramProposer


def make_ngram_proposer(draft_tokens: int, shortest: int, longest: int) -> NgramProposer:
    """vLLM's drafter for method=ngram, without an engine: its `propose` is called as the engine does.

    Args:
        shortest, longest: tokens of a match.
    """
    speculative = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest, "num_speculative_tokens": draft_tokens}
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**speculative),
        model_config=SimpleNamespace(max_model_len=1024),  # raised as texts grow
        scheduler_config=SimpleNamespace(max_num_seqs=1024),  # requests at once
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    proposer = NgramProposer(config)
    if "num_speculative_tokens" in inspect.signature(proposer.propose).parameters:  # from vLLM 0.24 on
        proposer.propose = functools.partial(proposer.propose, draft_tokens)
    return proposer
