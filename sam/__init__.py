"""Speculative decoding from the text that a policy writes itself: `sam.SamProposer` is its drafter for vLLM."""


def __getattr__(name: str):
    if name == "SamProposer":  # imported when it is asked for: all else of `sam` works without vLLM
        from sam.vllm.proposer import SamProposer

        return SamProposer
    raise AttributeError(f"module 'sam' has no attribute {name!r}")
