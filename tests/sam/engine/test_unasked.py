"""The installed package changes nothing of an engine for which no speculation is configured.

As a program, `python -m tests.sam.engine.test_unasked FOLDER`, it prints as JSON what vLLM does then: whether the
plugin is loaded, VLLM_PLUGINS decides before vLLM is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
PROMPTS = [[1 + row, 7, 30 + 3 * row, 2] * (2 + row) for row in range(6)]
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}


def save_model(folder: Path) -> None:
    """A model with a tokenizer of one word a token, and an adapter for it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.sam.engine import tiny_engine

    tiny_engine.save_model(folder, sharpness=12.0)
    words = {'{"a":': 0, "1": 1, "2": 2, "}": 3} | {f"w{token}": token for token in range(4, tiny_engine.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w4").save_pretrained(folder)
    (folder / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights |= {f"{name}A.weight": torch.randn(8, 64), f"{name}B.weight": torch.randn(128, 8)}
    save_file(weights, folder / "adapter" / "adapter_model.safetensors")


def behaviours(folder: Path) -> dict:
    # Root cause: where vLLM's cache of model classes is empty, it imports its LoRA layers before its CPU worker, which
    # replaces `async_tensor_h2d` for all that import it later. Symptom: the first engine with LoRA on a machine ends
    # with "Found no NVIDIA driver". Can go when vLLM's function asks the platform for pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    lora = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": True}
    llm = LLM(str(folder), dtype="float32", seed=0, max_model_len=256, max_num_seqs=4, enforce_eager=True, **lora)

    def answers(adapter=None, **settings) -> list:
        """Tokens and log-probabilities, greedy and drawn with seeds."""
        common = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
        asked = [
            SamplingParams(**common | {"temperature": float(row % 2), "seed": row} | settings)
            for row in range(len(PROMPTS))
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, asked, lora_request=adapter, use_tqdm=False)
        return [
            (list(one.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs])
            for one in (output.outputs[0] for output in outputs)
        ]

    found = {"plain": answers(), "prefix cached": answers()}
    found["named log-probabilities"] = answers(logprobs=None, logprob_token_ids=[15, 16, 17])
    found["lora"] = answers(LoRARequest("adapter", 1, str(folder / "adapter")))
    choices = StructuredOutputsParams(choice=["w7 w8", "w9 w10 w11"])
    # Greedy: what is drawn depends on the requests that share a step, and those on when a grammar is compiled.
    found["structured"] = answers(structured_outputs=choices, ignore_eos=False, temperature=0.0)
    llm.sleep(level=0)  # vLLM on a CPU knows no other
    llm.wake_up(tags=["scheduling"])
    found["woken"] = answers()
    llm.llm_engine.engine_core.shutdown()
    return found


def test_every_token_and_log_probability_is_that_of_stock_vllm_and_only_the_plugin_is_loaded(tmp_path):
    save_model(tmp_path)
    found = {}
    for plugins in ({"VLLM_PLUGINS": ""}, {}):
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | VLLM | plugins
        command = [sys.executable, "-m", "tests.sam.engine.test_unasked", str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        lines = [line.removeprefix("FOUND ") for line in run.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, run.stderr[-4000:]
        found[not plugins] = json.loads(lines[0])
    stock, installed = found[False]["behaviours"], found[True]["behaviours"]
    for name in ("plain", "prefix cached", "named log-probabilities", "lora", "woken"):
        assert installed[name] == stock[name], name
    # Requests wait until their grammar is compiled, in a thread: which share a step differs from run to run, and with
    # it the last bits of a log-probability.
    assert [tokens for tokens, _ in installed["structured"]] == [tokens for tokens, _ in stock["structured"]]
    assert stock["lora"] != stock["plain"]
    assert found[False]["loaded"] == []
    assert set(found[True]["loaded"]) - {"sam.config", "sam.log", "sam.reading", "sam.trained_drafter"} == {
        "sam.vllm", "sam.vllm.patches", "sam.vllm.ranks", "sam.vllm.plugin", "sam.vllm.v2", "sam.vllm.v2.engine"
    }  # fmt: skip


if __name__ == "__main__":
    said = {"behaviours": behaviours(Path(sys.argv[1]))}
    said["loaded"] = sorted(name for name in sys.modules if name.startswith("sam."))
    print("FOUND " + json.dumps(said))
