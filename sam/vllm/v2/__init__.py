"""vLLM's second model runner (vllm/v1/worker/gpu): the drafter of the first one, verification by the runner's sampler.

Nothing is replaced for an engine that does not draft. What is, stands in sam/vllm/patches.py.
"""
