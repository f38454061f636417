"""Asks vLLM, before anything is started, whether it takes the arguments that verl's server would hand to it.

`server_arguments` repeats verl's `vLLMHttpServer.launch_server`; a test compares the two. vLLM itself answers
(recipe.preflight.vllm_refusals), in a process that ends afterwards: importing vLLM takes 8 to 10 s of a core, and the
process that starts a run must stay light. What it has taken once, with the same model and versions, is not asked again.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, versions
from recipe.launch.config import REPOSITORY
from recipe.preflight import vllm_refusals
from recipe.preflight.problem import Problem

ACCEPTED = REPOSITORY / ".cache" / "vllm_arguments"  # an empty file for all arguments that vLLM takes together
LIMIT_SECONDS = 120.0
ROLLOUT = "actor_rollout_ref.rollout"
# vLLM's argument, and the key of verl's rollout section that it comes from.
ROLLOUT_KEYS = {
    name: name
    for name in (
        "dtype", "load_format", "max_model_len", "max_num_seqs", "enable_chunked_prefill", "max_num_batched_tokens",
        "enable_prefix_caching", "enable_sleep_mode", "logprobs_mode", "enforce_eager", "gpu_memory_utilization",
        "disable_log_stats", "seed", "quantization", "scheduling_policy",
    )
} | {"tensor_parallel_size": "tensor_model_parallel_size"}  # fmt: skip


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """In about 10 s, or at once where the same was found good before. Nothing is said if vLLM cannot be asked."""
    question = _question(config)
    good = ACCEPTED / _fingerprint(question)
    if good.is_file():
        return
    refused = _refusals_by_a_process(question)
    if refused == []:
        with contextlib.suppress(OSError):
            good.parent.mkdir(parents=True, exist_ok=True)
            good.touch()
    yield from _problems(config, refused or [])


def find_problems_here(config: DictConfig) -> Iterator[Problem]:
    """The same within this process, which imports vLLM."""
    yield from _problems(config, vllm_refusals.refusals(**_question(config)))


def server_arguments(config: DictConfig) -> dict[str, Any]:
    """vLLM's arguments for the first server of the first replica, by name; None: not given."""
    # The first is verl's default, which its YAML files leave out.
    section = {"enable_sleep_mode": True, **OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)}
    engine = {name: value for name, value in (section["engine_kwargs"].get("vllm") or {}).items() if value is not None}
    compilation = engine.pop("compilation_config", None) or {}
    compilation = json.loads(compilation) if isinstance(compilation, str) else dict(compilation)
    compilation.setdefault("cudagraph_mode", "FULL_AND_PIECEWISE")
    if section["cudagraph_capture_sizes"]:
        compilation["cudagraph_capture_sizes"] = section["cudagraph_capture_sizes"]
    generation = {name: section[name] for name in ("temperature", "top_k", "top_p")}
    generation |= {"repetition_penalty": 1.0, "max_new_tokens": section["response_length"]}
    return {
        **{name: section[key] for name, key in ROLLOUT_KEYS.items()},
        "skip_tokenizer_init": False,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "recipe.rollout.server.SpeculationWorkerExtension",
        "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
        "override_generation_config": json.dumps(generation),
        "hf_overrides": {},
        "compilation_config": json.dumps(compilation),
        **engine,
        **_parallel_arguments(section, config.trainer.n_gpus_per_node),
    }


def _parallel_arguments(section: dict[str, Any], devices: int) -> dict[str, Any]:
    """`devices`: of one node."""
    tensor, data = section["tensor_model_parallel_size"], section["data_parallel_size"]
    nodes = max(1, tensor * data // devices)
    found: dict[str, Any] = {"enable_expert_parallel": section["expert_parallel_size"] > 1}
    if data > 1:
        local = min(tensor * data, devices) // tensor
        found |= {"data_parallel_size": data, "data_parallel_size_local": local, "data_parallel_start_rank": 0}
    if nodes > 1:
        found |= {"master_addr": "127.0.0.1", "master_port": 1, "node_rank": 0, "nnodes": nodes}
    if data > 1 or nodes > 1:
        found |= {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": 2}
    return found


def _question(config: DictConfig) -> dict[str, Any]:
    """Without what changes from run to run and is checked elsewhere: the seed, and this project's own settings."""
    arguments = server_arguments(config)
    del arguments["seed"]
    if isinstance(additional := arguments.get("additional_config"), dict):
        arguments["additional_config"] = {name: value for name, value in additional.items() if name != "speculation"}
    model = Path(config.actor_rollout_ref.model.path).expanduser().absolute()
    return {"arguments": arguments, "model": str(model), "device": config.trainer.device}


def _refusals_by_a_process(question: dict[str, Any]) -> list[vllm_refusals.Refusal] | None:
    """None: vLLM cannot be asked."""
    defaults = environment.OFFLINE | environment.FIRST_MODEL_RUNNER | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if question["device"] == "cpu":
        defaults |= environment.CPU
    command = [sys.executable, "-m", "recipe.preflight.vllm_refusals", json.dumps(question)]
    try:
        # From this project's folder: the child must find `recipe` as this process did.
        run = subprocess.run(
            command, env=defaults | os.environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        return json.loads(run.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, IndexError, ValueError):
        return None


def _fingerprint(question: dict[str, Any]) -> str:
    """Of what the answer depends on; the model counts by its config.json."""
    parts = [json.dumps({**question, "model": None})]
    parts += [f"{name} {versions.installed(name)}" for name in ("vllm", "vllm-ascend", "transformers")]
    parts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("VLLM_"))
    files = Path(question["model"]) / "config.json", Path(vllm_refusals.__file__)
    parts += [file.read_text() if file.is_file() else "" for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _problems(config: DictConfig, refused: list[vllm_refusals.Refusal]) -> Iterator[Problem]:
    arguments = server_arguments(config)
    for name, reason in refused:
        value = f"{key_of(name, config)}={arguments.get(name)}" if name else f"what {ROLLOUT} hands to vLLM"
        yield Problem("vllm.arguments", f"{value}: {reason}")


def key_of(argument: str, config: DictConfig) -> str:
    """The key that a user sets an argument of vLLM's with."""
    if argument in config.actor_rollout_ref.rollout.engine_kwargs.vllm or argument not in ROLLOUT_KEYS:
        return f"{ROLLOUT}.engine_kwargs.vllm.{argument}"
    return f"{ROLLOUT}.{ROLLOUT_KEYS[argument]}"
