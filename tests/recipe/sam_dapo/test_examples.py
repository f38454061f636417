"""The examples: what they start is composed, and verl and vLLM are asked whether they take it."""

import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.utils.config import validate_config

from recipe.sam_dapo.preflight import device_memory
from recipe.sam_dapo.preflight.vllm_command import engine_arguments
from sam.config import SpeculationConfig
from tests.recipe.sam_dapo.preflight.test_machine import QWEN3_8B, QWEN3_32B
from tests.recipe.sam_dapo.test_verl_plugin import composed

EXAMPLES = Path(__file__).parents[3] / "examples"
GIB = re.compile(r"# Memory of a (?:GPU|die), estimated: (\d+) GiB while it trains; (\d+) while it generates\.")


def started(folder: Path, script: str, *words: str, **variables: str) -> list[str]:
    """The words with which a script starts its program, which prints them."""
    for name in ("python", "vllm"):
        (folder / name).write_text('#!/bin/bash\nprintf "%q " "$@"\n')
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), **variables}
    command = ["bash", EXAMPLES / script, *words]
    return shlex.split(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


@pytest.mark.parametrize(
    ("script", "model", "device", "engines"),
    [("grpo_qwen3_8b_h100.sh", QWEN3_8B, "cuda", 4), ("grpo_qwen3_32b_a3.sh", QWEN3_32B, "npu", 4)],
)
def test_a_training_is_one_of_verls_with_drafts_as_measured(tmp_path, script, model, device, engines):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    module, trainer, search, *words = started(tmp_path, script, MODEL_PATH=str(tmp_path / "model"))
    assert (module, trainer, search) == ("-m", "verl.trainer.main_ppo", "hydra.searchpath=[pkg://sam.configs]")
    config = composed(*words)
    validate_config(config, use_reference_policy=False, use_critic=False)
    wanted = {"method": "ngram_gpu", "num_speculative_tokens": 8}
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config == wanted
    assert (config.trainer.device, config.speculation.policy, config.speculation.sharing) == (device, "goodput", "auto")
    parsed = engine_arguments(config)
    assert device_memory.device_count(config) // parsed.tensor_parallel_size == engines
    off = composed(*started(tmp_path, script, SPECULATION="off")[3:])
    assert off.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config is None
    memory = device_memory.device_memory(config)
    training, generating = sum(memory.training), memory.generation.weights + memory.generation.cache
    assert max(training, generating) < memory.device
    assert GIB.search((EXAMPLES / script).read_text()).groups() == (f"{training:.0f}", f"{generating:.0f}")


@pytest.mark.parametrize("program", ["true", "nvidia-smi"])
def test_a_server_is_told_to_draft_on_a_cpu_and_on_a_gpu(tmp_path, program):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (tmp_path / program).touch(0o755)
    serve, model, *words = started(tmp_path, "serve.sh", "a/model", "--max-model-len", "512")
    assert (serve, model, words[-2:]) == ("serve", "a/model", ["--max-model-len", "512"])
    parsed = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
    told = parsed.speculative_config
    assert told == {"model": "sam.SamProposer", "num_speculative_tokens": 8}
    engine = SimpleNamespace(additional_config=parsed.additional_config, speculative_config=SimpleNamespace(**told))
    assert SpeculationConfig.from_vllm(engine) == SpeculationConfig()


def test_a_program_asks_for_drafts_and_says_how_many_stood(monkeypatch, capsys):
    """With a stand-in for the engine; vLLM's own arguments are made of what it is given."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    counts = {"num_drafts": 1, "num_draft_tokens": 8, "num_accepted_tokens": 5}

    class Engine:
        def __init__(self, model: str, **arguments):
            asked = EngineArgs(model, **arguments)
            assert asked.speculative_config == {"model": "sam.SamProposer", "num_speculative_tokens": 8}

        def generate(self, question: str, sampling: vllm.SamplingParams) -> list[SimpleNamespace]:
            return [SimpleNamespace(outputs=[SimpleNamespace(text=f" {question}\n")] * sampling.n)]

        def get_metrics(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counts.items()]

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(vllm, "LLM", Engine)
    runpy.run_path(str(EXAMPLES / "offline.py"))["main"]("a/model", "why?")
    said = capsys.readouterr().out.splitlines()
    assert said == [*(f"{number}: why?" for number in range(1, 9)), "drafted: 8 tokens", "accepted: 5 tokens"]
