"""The table of all checks, and those that compare values of the config with each other or with installed packages."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, run_lock, versions
from recipe.launch.config import ConfigError
from recipe.preflight import (
    ascend,
    cluster,
    compatibility,
    device_memory,
    draft_model,
    files,
    machine,
    unknown_names,
    user_code,
    vllm_command,
)
from recipe.preflight.device_memory import device_count, longest_sequence, uses_megatron
from recipe.preflight.problem import Problem, did_you_mean

# Sizes of a replica: vLLM's argument, and the key of verl's rollout section.
ENGINE_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
}
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
UPDATE, DECODED = "actor.ppo_max_token_len_per_gpu", "max_num_seqs x (1 + num_speculative_tokens)"
VERL_AND_VLLM = "what verl and vLLM say"  # the check of that name


@dataclass(frozen=True)
class Check:
    """A subject to look at: its name in reports, the function that finds problems of a config, and where it is asked.

    start: before every run, imports nothing that takes long. node: on every node of a cluster. image: when an image is
    built. device: not on a machine without the config's device. npu: not for other devices.
    """

    name: str
    find: Callable[..., Iterable[Problem]]
    scopes: tuple[str, ...]


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    verl and vLLM are asked last: an answer that is not known yet takes 20 s. They are not asked of a drafter that is
    not there yet. `to_be_built` as in find_problems.
    """
    problems = list(find_problems(config, to_be_built))
    if not problems and not draft_model.is_missing(config):
        problems = list(vllm_command.find_problems(config))
    _refuse(problems)


def check_keys(config: DictConfig) -> None:
    """Raise ConfigError if keys or their types are wrong: all that looks at a config calculates with them."""
    _refuse(list(unknown_names.key_problems(config)))


def _refuse(problems: list[Problem]) -> None:
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates.

    Nothing is said of what lies below the directory `to_be_built`, nor of the run's directory then: several runs may be
    checked at once, each with a directory of its own.
    """
    if wrong := list(unknown_names.key_problems(config)):
        yield from wrong
        return
    below = [f"{folder}/" for folder in (to_be_built, to_be_built.absolute())] if to_be_built else []
    for problem in (problem for one in select(config, "start") for problem in one.find(config)):
        if not any(path in problem.value for path in below) and not (below and problem.code == "run_dir.in_use"):
            yield problem


def select(config: DictConfig, scope: str | None = None) -> list[Check]:
    """The checks of a scope that concern the config's device; None: all."""
    is_npu = config.trainer.device == "npu"
    return [one for one in CHECKS if (scope is None or scope in one.scopes) and (is_npu or "npu" not in one.scopes)]


def node_problems(content: dict) -> list[Problem]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    os.environ.setdefault("RAY_ADDRESS", "auto")  # Ray runs here: its ports and memory are taken by itself
    config = OmegaConf.create(content)
    return [problem for one in select(config, "node") for problem in one.find(config)]


def find_warnings(config: DictConfig) -> Iterator[str]:
    """What costs time or a promise but breaks nothing, and what nobody has tried."""
    yield from compatibility.find_warnings(config)
    for variable, key in (("MODEL_PATH", "actor_rollout_ref.model.path"), ("DATA_DIR", "data.train_files")):
        if (value := os.environ.get(variable)) and value not in (used := str(OmegaConf.select(config, key))):
            yield f"{variable}={value} has no effect on {config.config_name}, which reads {used}: set {key} instead"
    if config.trainer.device == "npu":
        yield from ascend.find_warnings(config)
    yield from user_code.find_warnings(config)
    # On a laptop nobody waits for the curves.
    if config.trainer.device != "cpu" and "wandb" in config.trainer.logger and not environment.has_wandb_key():
        yield (
            f"no key of wandb's here: the run is kept in {config.run_dir}/wandb, for wandb sync later; to watch it, "
            "run wandb login on every node, or set WANDB_API_KEY where Ray is started"
        )


def _run_directory(config: DictConfig) -> Iterator[Problem]:
    if said := run_lock.lock_problem(Path(config.run_dir)):
        value, _, remedy = said.rpartition(": ")
        yield Problem("run_dir.in_use", value, remedy)


def _versions(config: DictConfig) -> Iterator[Problem]:
    yield from compatibility.find_problems(config, of_packages=True)
    device, of_cpu = config.trainer.device, versions.engine_of_cpu()
    if device != "npu" and of_cpu is not None and of_cpu is not (device == "cpu"):
        built = "CPUs" if of_cpu else "GPUs"
        yield Problem("package.engine", f"trainer.device={device}, vLLM of {sys.prefix} is built for {built}")


def _training_packages(config: DictConfig) -> Iterator[Problem]:
    """What the pins of requirements/ do not hold: none of it comes as a wheel for every device."""
    device, actor = config.trainer.device, config.actor_rollout_ref.actor
    if uses_megatron(config):
        needed = ["megatron.core", "mbridge" if actor.megatron.vanilla_mbridge else "megatron.bridge"]
        if missing := [name for name in needed + ["mindspeed"] * (device == "npu") if not is_importable(name)]:
            yield Problem("package.megatron", " and ".join(missing))
        return
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    if device == "cuda" and attention == "flash_attention_2" and not is_importable("flash_attn"):
        yield Problem("package.flash_attention", f"{key}={attention}", f"install flash-attn, or set {key}=sdpa")
    if (ranks := actor.fsdp_config.ulysses_sequence_parallel_size) > 1 and attention != "flash_attention_2":
        value = f"actor.fsdp_config.ulysses_sequence_parallel_size={ranks}, {key}={attention}"
        yield Problem("package.flash_attention", value, "set the size to 1, or flash_attention_2")


def is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not there
        return False


def _batches(config: DictConfig) -> Iterator[Problem]:
    """Batches, lengths and token budgets that must fit each other."""
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    devices, longest, filtering = device_count(config), longest_sequence(config), config.algorithm.filter_groups.enable
    train, generated, mini = data.train_batch_size, data.gen_batch_size, actor.ppo_mini_batch_size
    responses, response, buffer = train * rollout.n, data.max_response_length, OmegaConf.select(config, BUFFER)
    rest = responses % devices
    split = "context_parallel_size" if uses_megatron(config) else "ulysses_sequence_parallel_size"
    update = actor.ppo_max_token_len_per_gpu * (actor.megatron if uses_megatron(config) else actor.fsdp_config)[split]
    drafted = config.speculation.num_speculative_tokens if config.speculation.method != "off" else 0
    step, decoded = rollout.max_num_batched_tokens, rollout.max_num_seqs * (1 + drafted)
    model_key = vllm_command.key_of("max_model_len", config)
    model = OmegaConf.select(config, model_key)
    generation_is_wrong = generated < train if filtering else train % generated
    buffer_is_wrong = buffer.enable and not 0 < buffer.len <= response
    rows = [
        ("batch.mini", train % mini, f"data.train_batch_size={train}, actor.ppo_mini_batch_size={mini}"),
        ("batch.generation", generation_is_wrong, f"data.gen_batch_size={generated}, data.train_batch_size={train}"),
        ("batch.samples", filtering and rollout.n < 2, f"actor_rollout_ref.rollout.n={rollout.n}"),
        ("batch.devices", rest, f"train_batch_size x rollout.n = {responses}, {devices} devices"),
        ("length.model", isinstance(model, int) and model < longest, f"{model_key}={model}, {longest} tokens"),
        ("length.overlong_buffer", buffer_is_wrong, f"{BUFFER}.len={buffer.len}, data.max_response_length={response}"),
        (
            "tokens.update",
            actor.use_dynamic_bsz and update < longest,
            f"{UPDATE} x {split} = {update}, {longest} tokens",
        ),
        ("tokens.rollout", step < decoded, f"rollout.max_num_batched_tokens={step}, {DECODED} = {decoded}"),
    ]
    for key, is_dynamic, total in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.use_dynamic_bsz, mini * rollout.n // devices),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_use_dynamic_bsz, responses // devices),
    ):
        size = OmegaConf.select(config.actor_rollout_ref, key)
        is_wrong = size and not is_dynamic and not rest and total % size
        rows.append(("batch.micro", is_wrong, f"actor_rollout_ref.{key}={size}, {total} responses of a device"))
    yield from (Problem(code, value) for code, is_wrong, value in rows if is_wrong)


def _filter_metric(config: DictConfig) -> Iterator[Problem]:
    """One that the recipe's reward does not give. What a user's gives is known after the first round."""
    from recipe.trainer import reward

    wanted, buffer = config.algorithm.filter_groups.metric, config.reward.reward_kwargs.overlong_buffer_cfg
    known = ("reward", *reward.METRICS, *(("overlong", "overlong_reward") if buffer.enable and buffer.log else ()))
    is_own = config.reward.custom_reward_function.path == f"pkg://{reward.__name__}"
    if config.algorithm.filter_groups.enable and is_own and wanted not in known:
        remedy = did_you_mean(wanted, known) or f"set it to one of {', '.join(known)}"
        yield Problem("batch.metric", f"algorithm.filter_groups.metric={wanted}", remedy)


def _parallel_sizes(config: DictConfig) -> Iterator[Problem]:
    rollout, devices = config.actor_rollout_ref.rollout, device_count(config)
    tensor, data, experts = (rollout[f"{name}_parallel_size"] for name in ("tensor_model", "data", "expert"))
    if devices % (tensor * data):
        value = f"{vllm_command.ROLLOUT}.tensor_model_parallel_size={tensor} x data_parallel_size={data}"
        yield Problem("parallel.rollout", f"{value}, {devices} devices")
    for name, size in rollout.engine_kwargs.vllm.items():
        # verl places its workers by the keys of its own, whatever vLLM is told here.
        if (own := ENGINE_SIZES.get(name)) and size != rollout[own]:
            value = f"{vllm_command.key_of(name, config)}={size}, rollout.{own}={rollout[own]}"
            yield Problem("parallel.engine_kwargs", value)
    if experts not in (1, tensor * data):
        yield Problem("parallel.expert", f"rollout.expert_parallel_size={experts}, replicas of {tensor * data} devices")
    if not uses_megatron(config):
        return
    sizes = config.actor_rollout_ref.actor.megatron
    pipeline, experts = sizes.pipeline_model_parallel_size, sizes.expert_model_parallel_size
    model, stage = sizes.tensor_model_parallel_size * pipeline * sizes.context_parallel_size, devices // pipeline
    if devices % model:
        yield Problem("parallel.megatron", f"actor.megatron: tensor x pipeline x context = {model}, {devices} devices")
    elif stage % experts:
        value = f"actor.megatron.expert_model_parallel_size={experts}, {stage} devices of a pipeline stage"
        yield Problem("parallel.megatron", value)


def _plugin(config: DictConfig) -> Iterator[Problem]:
    """Whether vLLM's processes would load this project's plugin; a patched vllm-ascend calls it by itself."""
    if config.trainer.device == "npu":
        return
    plugins, runner = os.environ.get("VLLM_PLUGINS"), os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if not any(one.name == "sam" for one in importlib.metadata.entry_points(group="vllm.general_plugins")):
        yield Problem("drafter.plugin", "sam is not registered with vLLM", "pip install --no-deps -e . where vLLM runs")
    if plugins is not None and "sam" not in plugins.split(","):
        yield Problem("drafter.plugin", f"VLLM_PLUGINS={plugins}", "add sam to it, or unset it")
    if runner != "0":
        yield Problem("drafter.plugin", f"VLLM_USE_V2_MODEL_RUNNER={runner}", "unset it")


# Every check; the order is the report's.
CHECKS = (
    Check("start", cluster.start_problems, ("start", "device")),
    Check("run directory", _run_directory, ("start",)),
    Check("versions", _versions, ("start", "device", "node", "image")),
    Check("training's packages", _training_packages, ("start", "device", "node", "image")),
    Check("Ascend: patches", ascend.patch_problems, ("start", "device", "node", "image", "npu")),
    Check("Ascend: graph mode", ascend.graph_problems, ("start", "image", "npu")),
    Check("compatibility", compatibility.find_problems, ("start",)),
    Check("variables", unknown_names.variable_problems, ("start", "node", "image")),
    Check("keys", unknown_names.key_problems, ()),
    Check("keys of ray.init", unknown_names.ray_problems, ()),
    Check("data", files.data_problems, ("start", "node")),
    Check("users' code and data", user_code.find_problems, ("start", "node")),
    Check("model", files.model_problems, ("start", "node")),
    Check("draft model", draft_model.find_problems, ("start", "node")),
    Check("plugin", _plugin, ("start", "device", "node", "image")),
    Check("history of responses", files.history_problems, ("start", "node")),
    Check("tokenizer", files.tokenizer_problems, ()),
    Check("batches, lengths and token budgets", _batches, ("start",)),
    Check("metric of dynamic sampling", _filter_metric, ("start",)),
    Check("parallel sizes", _parallel_sizes, ("start",)),
    Check("memory of a device", device_memory.find_problems, ("start",)),
    Check("memory, disk and ports of this machine", machine.find_problems, ("start", "device", "node")),
    Check(VERL_AND_VLLM, vllm_command.find_problems_here, ("image",)),
    Check("Ray cluster", lambda config: cluster.find_problems(config, node_problems), ()),
    Check("weight sync", machine.weight_sync_problems, ("device", "npu")),
)
