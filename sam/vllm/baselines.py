"""vLLM's own prompt lookup and its rejection sampler, to compare with."""

import importlib
import os


def prompt_lookup():
    """vLLM's function that drafts by prompt lookup: (text, shortest match, longest match, longest text, budget)."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    return _find_longest_matched_ngram_and_propose_tokens


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
