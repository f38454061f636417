"""The examples: what they start is composed, and verl and vLLM are asked whether they take it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.utils.config import validate_config

from recipe.sam_dapo.preflight import machine
from recipe.sam_dapo.preflight.vllm_command import engine_arguments
from recipe.sam_dapo.tiny.assets import AssetSettings, prepare_assets
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
    assert machine.device_count(config) // parsed.tensor_parallel_size == engines
    off = composed(*started(tmp_path, script, SPECULATION="off")[3:])
    assert off.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config is None
    found = machine.device_memory(config)
    training, generating = sum(found.training.values()), found.weights + found.cache
    assert max(training, generating) < found.device
    assert GIB.search((EXAMPLES / script).read_text()).groups() == (f"{training:.0f}", f"{generating:.0f}")


@pytest.mark.parametrize(("program", "drafter"), [("true", "sam.SamProposer"), ("nvidia-smi", "ngram_gpu")])
def test_a_server_is_told_to_draft_on_a_cpu_and_on_a_gpu(tmp_path, program, drafter):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (tmp_path / program).touch(0o755)
    serve, model, *words = started(tmp_path, "serve.sh", "a/model", "--max-model-len", "512")
    assert (serve, model, words[-2:]) == ("serve", "a/model", ["--max-model-len", "512"])
    parsed = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
    told = parsed.speculative_config
    assert drafter in (told.get("model"), told.get("method")) and told["num_speculative_tokens"] == 8
    engine = SimpleNamespace(additional_config=parsed.additional_config, speculative_config=None)
    assert SpeculationConfig.from_vllm(engine) == SpeculationConfig()


@pytest.mark.engine
def test_the_answers_of_an_engine_on_a_cpu(tmp_path):
    """In processes of its own, as a user starts it."""
    prepare_assets(tmp_path / "assets", AssetSettings())
    command = [sys.executable, EXAMPLES / "offline.py", tmp_path / "assets" / "model", "from f to i begin 7 3\n\n"]
    variables = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"^(\w+): (\d+) tokens$", done.stdout, re.M))
    assert 0 < int(found["accepted"]) <= int(found["drafted"]), done.stdout
    assert len(re.findall(r"^\d: ", done.stdout, re.M)) == 8
