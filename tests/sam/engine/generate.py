"""Generates with a real vLLM engine on CPU in a process of its own; prints tokens, log-probs and counters as JSON.

python tests/sam/engine/generate.py MODEL METHOD MAX_NUM_SEQS
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
)

PROMPTS, SAMPLES, LENGTH, K = 5, 8, 200, 3


def main(model: str, method: str, max_num_seqs: int) -> None:
    from vllm import LLM, SamplingParams

    from sam.vllm.plugin import installed
    from sam.vllm.step_recorder import StepRecorder

    speculation = {"method": method, "policy": "threshold", "batch_size_threshold": 16, "verification": "exact"}
    speculative = {
        "off": {},
        "sam": {"speculative_config": {"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": K}},
        "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4,
                                         "prompt_lookup_min": 2}},
    }[method]  # fmt: skip
    engine = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256, skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
        additional_config={"speculation": speculation}, **speculative,
    )  # fmt: skip
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    status = installed(runner)
    recorder = StepRecorder.attach(runner)
    prompts, parameters = [], []
    for prompt in range(PROMPTS):
        for sample in range(SAMPLES):
            prompts.append({"prompt_token_ids": [1 + prompt, 7, 30 + 3 * prompt, 2]})
            greedy = sample == 0
            parameters.append(
                SamplingParams(
                    temperature=0.0 if greedy else 0.2 + 0.1 * (sample % 3),
                    top_p=0.9 if sample == 7 else 1.0,
                    max_tokens=LENGTH - 10 * sample,
                    ignore_eos=True,
                    seed=None if sample == 6 else 100 * prompt + sample,
                    logprobs=0,
                    detokenize=False,
                )
            )
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    record = recorder.take()
    # Finished requests are released by the next step: one more request releases them all and stays itself.
    engine.generate(prompts[0], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), use_tqdm=False)
    result = {
        "status": status,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
            for o in outputs
        ],
        **{name: int(getattr(record, name).sum()) for name in ("drafted", "accepted", "emitted")},
        "drafting_above_threshold": int((record.drafting & (record.running > 17)).sum()),
        "counters": record.counters,
        "followed": len(getattr(getattr(runner, "drafter", None), "_tracked", ())),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
