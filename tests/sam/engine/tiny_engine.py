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
COUNTERS = {
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "num_preemptions": "preemptions",
}
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


class Engine:
    """vLLM's LLM with this project's section, for any number of requests after each other; closed by `with`.

    Args:
        speculation: further keys of the section.
        engine: further arguments of vLLM's LLM.
    """

    def __init__(
        self,
        model,
        speculative_config=None,
        batch=64,
        verification="exact",
        policy="threshold",
        step_cost=None,
        threshold=1000,
        batch_invariant="auto",
        speculation=None,
        **engine,
    ):
        from vllm import LLM

        plugin.register()
        self.llm = LLM(
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
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._counted = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.runner
        gc.collect()

    def generate(self, prompts, settings, logprobs=2, then=None) -> SimpleNamespace:
        """Tokens and log-probabilities of every prompt, what was counted since the last call, and what is installed.

        Args:
            settings: keywords of SamplingParams, one for each prompt.
            then: called with the LLM afterwards, before counters are read.
        """
        from vllm import SamplingParams

        common = {"temperature": 1.0, "logprobs": logprobs, "ignore_eos": True, "detokenize": False}
        parameters = [SamplingParams(**common | own) for own in settings]
        self.llm.reset_prefix_cache()  # as if nothing had been asked before
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        installed = plugin.installed(self.runner)  # a step recorder would stand before what it looks for
        if then:
            then(self.llm)
        before, self._counted = self._counted, {one.name: getattr(one, "value", 0) for one in self.llm.get_metrics()}
        counted = {name: self._counted.get(f"vllm:{name}", 0) - before.get(f"vllm:{name}", 0) for name in COUNTERS}
        answers = [output.outputs[0] for output in outputs]
        entries = [
            [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs or []] for one in answers
        ]
        return SimpleNamespace(
            tokens=[one.token_ids for one in answers],
            logprobs=[
                [step[token] for step, token in zip(own, one.token_ids, strict=False)]
                for own, one in zip(entries, answers, strict=True)
            ],
            entries=entries,
            best=[[max(step.values()) for step in own] for own in entries],
            installed=installed,
            **{COUNTERS[name]: value for name, value in counted.items()},
        )


def generate(model, prompts, settings, *arguments, observe=None, logprobs=2, then=None, **engine) -> SimpleNamespace:
    """What an `Engine` of its own gives; `observe` is called with the model runner before the first request."""
    with Engine(model, *arguments, **engine) as started:
        if observe:
            observe(started.runner)
        return started.generate(prompts, settings, logprobs, then)
