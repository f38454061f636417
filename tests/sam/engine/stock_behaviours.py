"""`python -m tests.sam.engine.stock_behaviours FOLDER`: what vLLM does with no speculation configured, as JSON.

A process of its own: whether this project's plugin is loaded, VLLM_PLUGINS decides before vLLM is imported.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

PROMPTS = [[1 + row, 7, 30 + 3 * row, 2] * (2 + row) for row in range(6)]
ADAPTED = "qwen3"


def save_models(folder: Path) -> None:
    """Four architectures with random weights, a tokenizer of one word a token, and an adapter for the first."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = {
        "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    grouped = {**shape, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}
    configs = {
        ADAPTED: grouped,
        "llama": grouped,
        "gemma3_text": {**grouped, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "opt": {**shape, "num_attention_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": 64},
    }
    words = {'{"a":': 0, "1": 1, "2": 2, "}": 3} | {f"w{token}": token for token in range(4, 300)}
    for name, config in configs.items():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config)).float()
        with torch.no_grad():
            network.get_output_embeddings().weight.mul_(12.0)
        network.save_pretrained(folder / name)
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w4"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w4").save_pretrained(folder / name)
    adapter = folder / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights |= {f"{name}A.weight": torch.randn(8, 64), f"{name}B.weight": torch.randn(128, 8)}
    save_file(weights, adapter / "adapter_model.safetensors")


class Engine:
    """vLLM's LLM with no speculation configured."""

    def __init__(self, model: Path, **arguments):
        from vllm import LLM

        self.llm = LLM(
            str(model), dtype="float32", seed=0, max_model_len=256, max_num_seqs=4, enforce_eager=True, **arguments
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def answers(self, prompts=None, lora=None, **settings) -> list:
        """Tokens and log-probabilities, greedy and drawn with seeds."""
        from vllm import SamplingParams

        prompts = prompts or [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        common = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
        asked = [
            SamplingParams(**common | {"temperature": float(row % 2), "seed": row} | settings)
            for row in range(len(prompts))
        ]
        outputs = self.llm.generate(prompts, asked, lora_request=lora, use_tqdm=False)
        return [
            (list(one.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs])
            for one in (output.outputs[0] for output in outputs)
        ]


def behaviours(folder: Path) -> dict:
    import torch

    # Root cause: where vLLM's cache of model classes is empty, it imports its LoRA layers before its CPU worker, which
    # replaces `async_tensor_h2d` for all that import it later. Symptom: the first engine with LoRA on a machine ends
    # with "Found no NVIDIA driver". Can go when vLLM's function asks the platform for pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    found = {}
    for name in ("gemma3_text", "opt"):
        with Engine(folder / name) as engine:
            found[name] = engine.answers()
    with Engine(folder / "llama", enable_prefix_caching=True, enable_prompt_embeds=True) as engine:
        found["llama"] = engine.answers()
        found["prefix cached"] = engine.answers()
        found["named log-probabilities"] = engine.answers(logprobs=None, logprob_token_ids=[15, 16, 17])
        torch.manual_seed(1)
        found["embeds"] = engine.answers([{"prompt_embeds": torch.randn(length, 64)} for length in (3, 9, 20)])
        choices = StructuredOutputsParams(choice=["w7 w8", "w9 w10 w11"])
        # Greedy: what is drawn depends on the requests that share a step, and those on when a grammar is compiled.
        found["structured"] = engine.answers(structured_outputs=choices, ignore_eos=False, temperature=0.0)
    with Engine(folder / ADAPTED, enable_lora=True, max_lora_rank=8) as engine:
        found["before lora"] = engine.answers()
        found["lora"] = engine.answers(lora=LoRARequest("adapter", 1, str(folder / "adapter")))
        engine.llm.sleep(level=0)  # vLLM on a CPU knows no other
        engine.llm.wake_up(tags=["scheduling"])
        found["woken"] = engine.answers()
    return found


def main() -> None:
    found = behaviours(Path(sys.argv[1]))
    loaded = sorted(name for name in sys.modules if name.startswith("sam."))
    print("FOUND " + json.dumps({"behaviours": found, "loaded": loaded}))


if __name__ == "__main__":
    main()
