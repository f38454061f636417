"""Asks vLLM, before anything is started, whether it takes the arguments that verl's server would hand to it.

`server_arguments` repeats verl's `vLLMHttpServer.launch_server`; a test compares the two. vLLM itself answers, in a
process that ends afterwards: importing vLLM takes 8 to 10 s of a core, and the process that starts a run must stay
light. The answer to the same arguments, model and versions is kept in a file, so that a second run does not ask again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, versions
from recipe.launch.config import REPOSITORY
from recipe.preflight.problem import Problem
from sam.record.atomic import replacing

ANSWERS = REPOSITORY / ".cache" / "vllm_arguments"
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
# Fields of vLLM's config classes whose arguments have other names.
ARGUMENT_OF_FIELD = {"cache_dtype": "kv_cache_dtype", "policy": "scheduling_policy"}
# Packages that vLLM and transformers do without where they are missing: 1.5 s of imports.
NOT_NEEDED = ("accelerate", "cv2", "scipy", "torchvision")
LONGEST_REASON = 300  # characters; some of vLLM's errors list every attention backend

Refusal = tuple[str | None, str]
"""An argument of vLLM's, None if its error names none, and the reason in one line."""


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """In about 10 s, or at once where the same was asked before. Nothing is said if vLLM cannot be asked."""
    yield from _lines(config, _kept_or_asked(config))


def find_problems_here(config: DictConfig) -> Iterator[Problem]:
    """The same within this process, which imports vLLM."""
    yield from _lines(config, refusals(**_question(config)))


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
    address = {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": 2}
    if data > 1:
        local = min(tensor * data, devices) // tensor
        found |= {"data_parallel_size": data, "data_parallel_size_local": local, "data_parallel_start_rank": 0}
        found |= address
    if nodes > 1:
        found |= {"master_addr": "127.0.0.1", "master_port": 1, "node_rank": 0, "nnodes": nodes, **address}
    return found


def _question(config: DictConfig) -> dict[str, Any]:
    """Without what changes from run to run and is checked elsewhere: the seed, and this project's own settings."""
    arguments = server_arguments(config)
    del arguments["seed"]
    if isinstance(additional := arguments.get("additional_config"), dict):
        arguments["additional_config"] = {name: value for name, value in additional.items() if name != "speculation"}
    model = Path(config.actor_rollout_ref.model.path).expanduser().absolute()
    return {"arguments": arguments, "model": str(model), "device": config.trainer.device}


def _kept_or_asked(config: DictConfig) -> list[Refusal]:
    question = _question(config)
    kept = ANSWERS / f"{_fingerprint(question)}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(kept.read_text())
    defaults = environment.OFFLINE | environment.FIRST_MODEL_RUNNER | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if config.trainer.device == "cpu":
        defaults |= environment.CPU
    command = [sys.executable, "-m", "recipe.preflight.vllm_command", json.dumps(question)]
    try:
        # From this project's folder: the child must find `recipe` as this process did.
        run = subprocess.run(
            command, env=defaults | os.environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        answer = json.loads(run.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, IndexError, ValueError):
        return []
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as partial:
            partial.write_text(json.dumps(answer))
    return answer


def _fingerprint(question: dict[str, Any]) -> str:
    """Of what the answer depends on; the model counts by its config.json."""
    parts = [json.dumps({**question, "model": None})]
    parts += [f"{name} {versions.installed(name)}" for name in ("vllm", "vllm-ascend", "transformers")]
    parts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("VLLM_"))
    for file in (Path(question["model"]) / "config.json", Path(__file__)):
        parts.append(file.read_text() if file.is_file() else "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _lines(config: DictConfig, refused: list[Refusal]) -> Iterator[Problem]:
    arguments = server_arguments(config)
    for name, reason in refused:
        if name is None:
            yield Problem("vllm.arguments", f"vLLM refuses what {ROLLOUT} hands to it: {reason}")
        else:
            yield Problem("vllm.arguments", f"{key_of(name, config)}={arguments.get(name)}: {reason}")


def key_of(argument: str, config: DictConfig) -> str:
    """The key that a user sets an argument of vLLM's with."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    if argument in given or argument not in ROLLOUT_KEYS:
        return f"{ROLLOUT}.engine_kwargs.vllm.{argument}"
    return f"{ROLLOUT}.{ROLLOUT_KEYS[argument]}"


# From here on vLLM is imported, inside the functions.


def refusals(arguments: dict[str, Any], model: str, device: str) -> list[Refusal]:
    """What vLLM refuses of the arguments for a model's folder on a device (cpu, cuda, npu)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {name.replace("-", "_"): value for name, value in arguments.items() if value is not None}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := set(given) - known - _server_only(set(given) - known):
        return [(name, _meant(name, known)) for name in sorted(unknown)]
    given = {name: value for name, value in given.items() if name in known}
    if (error := _error(given, model, device)) is None:
        return []
    if found := _named(error, given):
        return found
    # The error names no argument: the one without which it goes away.
    for name in given:
        if _error({other: value for other, value in given.items() if other != name}, model, device) is None:
            return [(name, _reason(error))]
    return [(None, _reason(error))]


def _server_only(unknown: set[str]) -> set[str]:
    """Arguments of vLLM's HTTP server, whose parser takes a second to import; asked where the engine knows one not."""
    if not unknown:
        return set()
    from vllm.entrypoints.openai.cli_args import FrontendArgs

    return {field.name for field in dataclasses.fields(FrontendArgs)}


def _meant(name: str, known: set[str]) -> str:
    meant = difflib.get_close_matches(name, known, 1)
    return "vLLM has no such argument: " + (f"did you mean {meant[0]}?" if meant else "remove it")


def _error(given: dict[str, Any], model: str, device: str) -> Exception | None:
    try:
        _build(engine_arguments(given, model), model, device)
    except Exception as error:
        return error
    return None


def engine_arguments(arguments: dict[str, Any], model: str) -> Any:
    """vLLM's AsyncEngineArgs, read by its own parser from the command line that verl writes.

    Raises:
        ValueError: the parser refuses it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise ValueError(message)

    parser = AsyncEngineArgs.add_cli_args(Parser())
    folder = model if Path(model).is_dir() else str(REPOSITORY)  # vLLM would look for a hub's model of that name
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", folder, *command_line(arguments)]))


def command_line(arguments: dict[str, Any]) -> list[str]:
    """As verl's build_cli_args_from_config."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # Flags that vLLM may turn on where they are left out.
    needs_no = {
        field.name
        for field in dataclasses.fields(AsyncEngineArgs)
        if set(get_args(field.type)) == {bool, type(None)} or (field.type is bool and field.default in (None, True))
    }
    line: list[str] = []
    for name, value in arguments.items():
        if isinstance(value, bool):
            line += [f"--{name}"] if value else [f"--no-{name}"] if name.replace("-", "_") in needs_no else []
        elif isinstance(value, list):
            line += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            line += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return line


def _build(engine: Any, model: str, device: str) -> None:
    """The engine's whole config where its device and its model are there; what needs neither where they are not."""
    from vllm.config import CacheConfig, SchedulerConfig
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    if engine.create_load_config().load_format not in ("auto", "dummy", "safetensors"):
        from vllm.model_executor.model_loader import get_model_loader

        get_model_loader(engine.create_load_config())
    if current_platform.device_type == device and (Path(model) / "config.json").is_file():
        engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        return
    CacheConfig(
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        cache_dtype=engine.kv_cache_dtype,
    )
    longest = engine.max_model_len or 1
    SchedulerConfig(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=longest,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        is_encoder_decoder=False,
        policy=engine.scheduling_policy,
        stream_interval=engine.stream_interval,
    ).verify_max_model_len(longest)


def _named(error: Exception, given: dict[str, Any]) -> list[Refusal]:
    """The arguments that an error names: pydantic as fields, others in their text, with `-` or with `_`."""
    fields = [str(one["loc"][0]) for one in error.errors() if one["loc"]] if hasattr(error, "errors") else []
    words = re.findall(r"[a-z][a-z0-9_]+", str(error).replace("-", "_"))
    spelled_out = [name for name in given if "_" in name and name.replace("_", " ") in str(error)]
    for names in (fields, words, spelled_out):
        arguments = [ARGUMENT_OF_FIELD.get(name, name) for name in names]
        if known := [name for name in arguments if name in given]:
            return [(known[0], _reason(error))]
    return []


def _reason(error: Exception) -> str:
    """In one line: what was expected, in vLLM's words where there are no shorter ones."""
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
    text = re.sub(r"\[type=.*| For further information visit .*", "", " ".join(text.split())).strip(" .")
    if isinstance(error, KeyError):
        return f"{text} is none of the values that vLLM knows: change it"
    if found := re.fullmatch(r"Input should be (.*)", text):
        return f"vLLM expects a value {found[1]}: change it"
    if found := re.fullmatch(r"argument \S+ invalid choice: .* \(choose from (.*)\)", text):
        return f"vLLM expects one of {found[1].replace(chr(39), '')}: change it"
    if found := re.fullmatch(r"argument \S+ invalid (\w+) value: .*", text):
        return f"vLLM expects a value of type {found[1]}: change it"
    text = re.sub(r"^(Value error|Assertion failed), ", "", text)
    shortened = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    return f"vLLM says '{shortened}': change it"


def main() -> None:
    """One question on the command line, one line of JSON as the answer."""
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)
    stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to stdout
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it would import vLLM once more
    print(json.dumps(refusals(**json.loads(sys.argv[1]))), file=stdout)


if __name__ == "__main__":
    main()
