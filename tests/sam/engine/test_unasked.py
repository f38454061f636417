"""The installed package changes nothing of an engine for which no speculation is configured.

As a program, `python -m tests.sam.engine.test_unasked MODEL ADAPTER`, it prints as JSON what vLLM does then: whether
the plugin is loaded, VLLM_PLUGINS decides before vLLM is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.engine
PROMPTS = [[1 + row, 7, 30 + 3 * row, 2] * (2 + row) for row in range(6)]
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}


def save_adapter(folder: Path) -> None:
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights |= {f"{name}A.weight": torch.randn(8, 64), f"{name}B.weight": torch.randn(128, 8)}
    save_file(weights, folder / "adapter_model.safetensors")


def behaviours(model: str, adapter: str) -> dict:
    # Root cause: where vLLM's cache of model classes is empty, it imports its LoRA layers before its CPU worker, which
    # replaces `async_tensor_h2d` for all that import it later. Symptom: the first engine with LoRA on a machine ends
    # with "Found no NVIDIA driver". Can go when vLLM's function asks the platform for pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    lora = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": True}
    llm = LLM(model, dtype="float32", seed=0, max_model_len=256, max_num_seqs=4, enforce_eager=True, **lora)

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
    found["lora"] = answers(LoRARequest("adapter", 1, adapter))
    # Greedy and without log-probabilities: which requests share a step depends on when a grammar is compiled, in a
    # thread, and with it the last bits.
    choices = StructuredOutputsParams(choice=["w7 w8", "w9 w10 w11"])
    structured = answers(structured_outputs=choices, ignore_eos=False, temperature=0.0)
    found["structured"] = [tokens for tokens, _ in structured]
    llm.sleep(level=0)  # vLLM on a CPU knows no other
    llm.wake_up(tags=["scheduling"])
    found["woken"] = answers()
    llm.llm_engine.engine_core.shutdown()
    return found


def test_every_token_and_log_probability_is_that_of_stock_vllm_and_only_the_plugin_is_loaded(model, tmp_path):
    save_adapter(tmp_path)
    found = []
    for plugins in ({"VLLM_PLUGINS": ""}, {}):
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | VLLM | plugins
        command = [sys.executable, "-m", "tests.sam.engine.test_unasked", model.path, str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        lines = [line.removeprefix("FOUND ") for line in run.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, run.stderr[-4000:]
        found.append(json.loads(lines[0]))
    stock, installed = found
    assert installed["behaviours"] == stock["behaviours"]
    assert stock["behaviours"]["lora"] != stock["behaviours"]["plain"]
    assert stock["loaded"] == []
    assert set(installed["loaded"]) - {"sam.config", "sam.log", "sam.reading", "sam.trained_drafter"} == {
        "sam.vllm", "sam.vllm.patches", "sam.vllm.ranks", "sam.vllm.plugin", "sam.vllm.v2", "sam.vllm.v2.engine"
    }  # fmt: skip


if __name__ == "__main__":
    said = {"behaviours": behaviours(*sys.argv[1:])}
    said["loaded"] = sorted(name for name in sys.modules if name.startswith("sam."))
    print("FOUND " + json.dumps(said))
