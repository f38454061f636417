"""`python -m recipe.preflight.vllm_refusals QUESTION`: what vLLM refuses of its arguments, one line of JSON.

vLLM is imported inside the functions: recipe.preflight.vllm_command, on the way of every run, imports this file.
"""

import contextlib
import dataclasses
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import pydantic

from recipe.launch.config import REPOSITORY
from recipe.preflight.problem import meant

# Fields of vLLM's config classes whose arguments have other names.
ARGUMENT_OF_FIELD = {"cache_dtype": "kv_cache_dtype", "policy": "scheduling_policy"}
# Packages that vLLM and transformers do without where they are missing: 1.5 s of imports.
NOT_NEEDED = ("accelerate", "cv2", "scipy", "torchvision")
LONGEST_REASON = 300  # characters; some of vLLM's errors list every attention backend

Refusal = tuple[str | None, str]
"""An argument of vLLM's, None if its error names none, and the reason in one line."""


def refusals(arguments: dict[str, Any], model: str, device: str) -> list[Refusal]:
    """What vLLM refuses of the arguments for a model's folder on a device (cpu, cuda, npu)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {name.replace("-", "_"): value for name, value in arguments.items() if value is not None}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := set(given) - known:
        # Those of vLLM's HTTP server, whose parser takes a second to import.
        from vllm.entrypoints.openai.cli_args import FrontendArgs

        unknown -= {field.name for field in dataclasses.fields(FrontendArgs)}
    if unknown:
        return [(name, f"no such argument ({meant(name, known) or 'remove it'})") for name in sorted(unknown)]
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
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from sam.vllm.plugin import check_recurrent_state

    has_model = (Path(model) / "config.json").is_file()
    if has_model and (drafts := engine.speculative_config):
        with contextlib.suppress(ImportError, OSError, pydantic.ValidationError):  # the engine says so below
            looked_at = ModelConfig(model, skip_tokenizer_init=True, trust_remote_code=engine.trust_remote_code)
            check_recurrent_state(looked_at, drafts.get("method", "custom_class"))
    if engine.create_load_config().load_format not in ("auto", "dummy", "safetensors"):
        from vllm.model_executor.model_loader import get_model_loader

        get_model_loader(engine.create_load_config())
    if current_platform.device_type == device and has_model:
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
    arguments = [ARGUMENT_OF_FIELD.get(name, name) for name in (*fields, *words, *spelled_out)]
    return [(name, _reason(error)) for name in arguments if name in given][:1]


def _reason(error: Exception) -> str:
    """In one line, in vLLM's words: argparse and pydantic say what they expected."""
    text = " ".join((error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)).split())
    text = re.sub(r"\[type=.*| For further information visit .*|(Value error|Assertion failed), ", "", text)
    known = " is none of the values that it knows" if isinstance(error, KeyError) else ""
    return textwrap.shorten(text, LONGEST_REASON, placeholder="...").strip(" .") + known


def main() -> None:
    """One question on the command line, one line of JSON as the answer."""
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)
    stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to stdout
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it would import vLLM once more
    print(json.dumps(refusals(**json.loads(sys.argv[1]))), file=stdout, flush=True)


if __name__ == "__main__":
    main()
