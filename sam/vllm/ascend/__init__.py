"""What vllm-ascend 0.23 needs beside vLLM's own wires; its patched rejection sampler imports these names from here."""

from sam.vllm.ascend.sampling import expand_pytorch, expand_triton, rejection_sample, sample_recovered_tokens

__all__ = ["expand_pytorch", "expand_triton", "rejection_sample", "sample_recovered_tokens"]
