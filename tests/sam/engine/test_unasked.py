"""The installed package changes nothing of an engine for which no speculation is configured.

As a program, `python -m tests.sam.engine.test_unasked MODEL FILE`, it writes what vLLM does then as JSON: whether the
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


def behaviours(model: str) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common = {"dtype": "float32", "seed": 0, "max_model_len": 256, "enforce_eager": True}
    llm = LLM(model, max_num_seqs=4, enable_prefix_caching=True, **common)

    def answers(**settings) -> list:
        """Tokens and log-probabilities, greedy and drawn with seeds."""
        usual = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
        asked = [
            SamplingParams(**usual | {"temperature": float(row % 2), "seed": row} | settings)
            for row in range(len(PROMPTS))
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
        return [
            (list(one.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs])
            for one in (output.outputs[0] for output in outputs)
        ]

    found = {"plain": answers(), "prefix cached": answers()}
    found["named log-probabilities"] = answers(logprobs=None, logprob_token_ids=[15, 16, 17])
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
    command = [sys.executable, "-m", "tests.sam.engine.test_unasked", model.path, str(tmp_path / "found.json")]
    found, usual = [], {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | VLLM
    for environment in (usual | {"VLLM_PLUGINS": ""}, usual):
        subprocess.run(command, env=environment, check=True, timeout=600)
        found.append(json.loads((tmp_path / "found.json").read_text()))
    (stock, without), (installed, loaded) = found
    assert installed == stock
    assert without == []
    assert set(loaded) - {"sam.config", "sam.log", "sam.reading", "sam.trained_drafter"} == {
        "sam.patching", "sam.vllm", "sam.vllm.doors", "sam.vllm.patches", "sam.vllm.ranks", "sam.vllm.plugin",
        "sam.vllm.choice", "sam.vllm.stopped_requests", "sam.vllm.v2", "sam.vllm.v2.engine",
    }  # fmt: skip


if __name__ == "__main__":
    found = behaviours(sys.argv[1])
    loaded = sorted(name for name in sys.modules if name.startswith("sam."))
    Path(sys.argv[2]).write_text(json.dumps([found, loaded]))
