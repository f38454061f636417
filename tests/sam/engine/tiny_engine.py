"""A real vLLM engine on CPU, in this process, with a random Qwen3 whose text repeats."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import gc
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sam.vllm import plugin

VOCABULARY = 300
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SAM = {"model": "sam.SamProposer", "num_speculative_tokens": 3}


def save_model(path, sharpness: float = 25.0, vocabulary: int = VOCABULARY, tied: bool = False) -> SimpleNamespace:
    """Peaked outputs, so that drafts are accepted now and then."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        network.lm_head.weight.mul_(sharpness)
    network.save_pretrained(path)
    return SimpleNamespace(path=str(path), network=network.eval())


def generate(
    model,
    prompts,
    settings,
    speculative_config=None,
    batch=64,
    verification="exact",
    observe=None,
    logprobs=2,
    policy="threshold",
    step_cost=None,
    threshold=1000,
    then=None,
    batch_invariant="auto",
    speculation=None,
    **engine,
) -> SimpleNamespace:
    """Tokens and log-probabilities of every prompt, counters, and what is installed.

    Args:
        settings: keywords of SamplingParams, one for each prompt.
        observe: called with the model runner before the first request.
        then: called with the engine after the last one.
        speculation: further keys of the section.
    """
    from vllm import LLM, SamplingParams

    plugin.register()
    llm = LLM(
        model=model.path,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=batch,
        speculative_config=speculative_config and dict(speculative_config),  # vLLM writes into it
        additional_config={
            "speculation": {
                "verification": verification,
                "policy": policy,
                "batch_size_threshold": threshold,
                "step_cost": step_cost,
                "batch_invariant": batch_invariant,
                **(speculation or {}),
            }
        },
        disable_log_stats=False,
        **{"dtype": "float32", "enforce_eager": True, **engine},
    )
    try:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        if observe:
            observe(runner)
        common = {"temperature": 1.0, "logprobs": logprobs, "ignore_eos": True, "detokenize": False}
        parameters = [SamplingParams(**common | own) for own in settings]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        if then:
            then(llm)
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        return SimpleNamespace(
            tokens=[o.outputs[0].token_ids for o in outputs],
            logprobs=[
                [step[t].logprob for step, t in zip(o.outputs[0].logprobs or [], o.outputs[0].token_ids, strict=False)]
                for o in outputs
            ],
            entries=[
                [{token: one.logprob for token, one in step.items()} for step in o.outputs[0].logprobs or []]
                for o in outputs
            ],
            best=[
                [max(entry.logprob for entry in step.values()) for step in o.outputs[0].logprobs or []] for o in outputs
            ],
            drafted=counters.get("vllm:spec_decode_num_draft_tokens", 0),
            accepted=counters.get("vllm:spec_decode_num_accepted_tokens", 0),
            preemptions=counters.get("vllm:num_preemptions", 0),
            installed=plugin.installed(runner),
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
