"""Answer a question eight times, with drafts from the answers themselves: python examples/offline.py [MODEL [QUESTION]]

MODEL is a folder, or a name as vLLM takes it; a device is not needed. The same for a server: examples/serve.sh.
"""

import sys

from vllm import LLM, SamplingParams

QUESTION = "What is the sum of the numbers from 1 to 20? Think step by step."
COUNTERS = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}


def main(model: str = "Qwen/Qwen3-0.6B", question: str = QUESTION) -> None:
    """Print the answers, and how many tokens were drafted and accepted."""
    llm = LLM(
        model,
        speculative_config={"model": "sam.SamProposer", "num_speculative_tokens": 8},
        max_model_len=1024,
        kv_cache_memory_bytes=2**30,  # vLLM takes most of the memory otherwise, which a laptop has not
        disable_log_stats=False,
    )
    answers = llm.generate(question, SamplingParams(n=8, seed=7, temperature=1.0, max_tokens=256))
    for number, output in enumerate(answers[0].outputs, start=1):
        print(f"{number}: {output.text.strip()}")
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            print(f"{COUNTERS[metric.name]}: {metric.value} tokens")


if __name__ == "__main__":  # vLLM's engine is a process of its own, which imports this file again
    main(*sys.argv[1:3])
