"""vLLM's own prompt lookup, to compare with."""


def prompt_lookup():
    """vLLM's function that drafts by prompt lookup: (text, shortest match, longest match, longest text, budget)."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    return _find_longest_matched_ngram_and_propose_tokens
