"""The table of all checks, and those that compare values of the config with each other or with installed packages."""

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
    files,
    machine,
    speculation,
    unknown_names,
    user_code,
    vllm_command,
)
from recipe.preflight.device_memory import device_count, longest_sequence, uses_megatron
from recipe.preflight.problem import Problem, meant

# Sizes of a replica: vLLM's argument, and the key of verl's rollout section.
ENGINE_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
}
# vLLM's arguments that keep KV cache outside an engine.
KV_POOL_KEYS = ("kv_transfer_config", "kv_offloading_size")


@dataclass(frozen=True)
class Check:
    """A subject to look at: its name in reports, the function that finds problems of a config, and where it is asked.

    start: before every run, imports nothing that takes long. node: on every node of a cluster. image: when an image is
    built. device: not on a machine without the config's device. npu: not for other devices. assets: `find` also takes
    a directory that is still to be built.
    """

    name: str
    find: Callable[..., Iterable[Problem]]
    scopes: tuple[str, ...]


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    vLLM is asked last: an answer that is not known yet takes 10 s. What lies below `to_be_built` is not looked at, and
    vLLM is not asked of a drafter that is not there yet.
    """
    problems = list(find_problems(config, to_be_built))
    if not problems and not files.lacks_drafter(config):
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
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates."""
    if wrong := list(unknown_names.key_problems(config)):
        yield from wrong
        return
    for one in select(config, "start"):
        yield from one.find(config, to_be_built) if "assets" in one.scopes else one.find(config)


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


def _run_directory(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    # What is still to be built is checked for several runs at once, each with a directory of its own.
    if to_be_built is None and (said := run_lock.lock_problem(Path(config.run_dir))):
        value, _, remedy = said.rpartition(": ")
        yield Problem("run_dir.in_use", value, remedy)


def _versions(config: DictConfig) -> Iterator[Problem]:
    yield from compatibility.version_problems(config)
    device, of_cpu = config.trainer.device, versions.engine_of_cpu()
    if device != "npu" and of_cpu is not None and of_cpu is not (device == "cpu"):
        built = "CPUs" if of_cpu else "GPUs"
        yield Problem("package.engine", f"trainer.device={device}, vLLM of {sys.prefix} is built for {built}")
    if config.speculation.method == "suffix" and versions.installed("arctic-inference") is None:
        yield Problem("package.suffix", "arctic-inference is not installed")


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
    actor, rollout, devices = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, device_count(config)
    train, generated, mini = config.data.train_batch_size, config.data.gen_batch_size, actor.ppo_mini_batch_size
    filtering, responses = config.algorithm.filter_groups.enable, train * rollout.n
    if train % mini:
        yield Problem("batch.mini", f"data.train_batch_size={train}, actor.ppo_mini_batch_size={mini}")
    if generated < train if filtering else train % generated:
        yield Problem("batch.generation", f"data.gen_batch_size={generated}, data.train_batch_size={train}")
    if filtering and rollout.n < 2:
        yield Problem("batch.samples", f"actor_rollout_ref.rollout.n={rollout.n}")
    if responses % devices:
        yield Problem("batch.devices", f"train_batch_size x rollout.n = {responses}, {devices} devices")
        return
    for key, is_dynamic, total in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.use_dynamic_bsz, mini * rollout.n // devices),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_use_dynamic_bsz, responses // devices),
    ):
        size = OmegaConf.select(config.actor_rollout_ref, key)
        if size and not is_dynamic and total % size:
            yield Problem("batch.micro", f"actor_rollout_ref.{key}={size}, {total} responses of a device")


def _filter_metric(config: DictConfig) -> Iterator[Problem]:
    """One that the recipe's reward does not give. What a user's gives is known after the first round."""
    from recipe.trainer import reward

    wanted, buffer = config.algorithm.filter_groups.metric, config.reward.reward_kwargs.overlong_buffer_cfg
    known = ("reward", *reward.METRICS, *(("overlong", "overlong_reward") if buffer.enable and buffer.log else ()))
    is_own = config.reward.custom_reward_function.path == f"pkg://{reward.__name__}"
    if config.algorithm.filter_groups.enable and is_own and wanted not in known:
        remedy = meant(wanted, known) or f"set it to one of {', '.join(known)}"
        yield Problem("batch.metric", f"algorithm.filter_groups.metric={wanted}", remedy)


def _lengths(config: DictConfig) -> Iterator[Problem]:
    longest, wanted = longest_sequence(config), vllm_command.server_arguments(config)["max_model_len"]
    if isinstance(wanted, int) and wanted < longest:
        yield Problem("length.model", f"{vllm_command.key_of('max_model_len', config)}={wanted}, {longest} tokens")
    buffer, response = config.reward.reward_kwargs.overlong_buffer_cfg, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= response:
        value = f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len}, data.max_response_length={response}"
        yield Problem("length.overlong_buffer", value)


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
    if uses_megatron(config):
        yield from _megatron_sizes(config.actor_rollout_ref.actor.megatron, devices)


def _megatron_sizes(sizes: DictConfig, devices: int) -> Iterator[Problem]:
    pipeline, experts = sizes.pipeline_model_parallel_size, sizes.expert_model_parallel_size
    model, stage = sizes.tensor_model_parallel_size * pipeline * sizes.context_parallel_size, devices // pipeline
    if devices % model:
        value = f"actor.megatron: tensor x pipeline x context = {model}, {devices} devices"
        yield Problem("parallel.megatron", value)
    elif stage % experts:
        value = f"actor.megatron.expert_model_parallel_size={experts}, {stage} devices of a pipeline stage"
        yield Problem("parallel.megatron", value)


def _kv_pool(config: DictConfig) -> Iterator[Problem]:
    # A pool knows KV by its tokens, not by the weights that computed it.
    for name in KV_POOL_KEYS:
        if (value := config.actor_rollout_ref.rollout.engine_kwargs.vllm.get(name)) is not None:
            yield Problem("pool.refused", f"{vllm_command.key_of(name, config)}={value}")


def _token_budgets(config: DictConfig) -> Iterator[Problem]:
    actor, rollout, longest = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, longest_sequence(config)
    name = "context_parallel_size" if uses_megatron(config) else "ulysses_sequence_parallel_size"
    room = actor.ppo_max_token_len_per_gpu * (actor.megatron if uses_megatron(config) else actor.fsdp_config)[name]
    if actor.use_dynamic_bsz and room < longest:
        yield Problem("tokens.update", f"actor.ppo_max_token_len_per_gpu x {name} = {room}, {longest} tokens")
    drafted = config.speculation.num_speculative_tokens if config.speculation.method != "off" else 0
    room, needed = rollout.max_num_batched_tokens, rollout.max_num_seqs * (1 + drafted)
    if room < needed:
        value = f"rollout.max_num_batched_tokens={room}, max_num_seqs x (1 + num_speculative_tokens) = {needed}"
        yield Problem("tokens.rollout", value)


def _verl(config: DictConfig) -> Iterator[Problem]:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        for part in ("actor", "rollout"):
            omega_conf_to_dataclass(config.actor_rollout_ref[part])
        # verl itself looks these up after the first rollout.
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    except KeyError as error:
        yield Problem("config.verl", f"{error} is none of the values it knows")
    except Exception as error:
        # Hydra says where first and why next, pydantic ends with a link.
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
        yield Problem("config.verl", " ".join(lines[:3]) or "a dictionary has an unknown key or a wrong type")


# Every check; the order is the report's.
CHECKS = (
    Check("start", cluster.start_problems, ("start", "device")),
    Check("run directory", _run_directory, ("start", "assets")),
    Check("versions", _versions, ("start", "device", "node", "image")),
    Check("training's packages", _training_packages, ("start", "device", "node", "image")),
    Check("Ascend: patches", ascend.patch_problems, ("start", "device", "node", "image", "npu")),
    Check("Ascend: settings", ascend.setting_problems, ("start", "image", "npu")),
    Check("Ascend: graph mode", ascend.graph_problems, ("start", "image", "npu")),
    Check("compatibility", compatibility.setting_problems, ("start",)),
    Check("variables", unknown_names.variable_problems, ("start", "node", "image")),
    Check("keys", unknown_names.key_problems, ()),
    Check("keys of ray.init", unknown_names.ray_problems, ()),
    Check("data", files.data_problems, ("start", "node", "assets")),
    Check("users' code and data", user_code.find_problems, ("start", "node", "assets")),
    Check("model", files.model_problems, ("start", "node", "assets")),
    Check("draft model", files.draft_model_problems, ("start", "node", "assets")),
    Check("history of responses", files.history_problems, ("start", "node", "assets")),
    Check("tokenizer", files.tokenizer_problems, ()),
    Check("batches", _batches, ("start",)),
    Check("metric of dynamic sampling", _filter_metric, ("start",)),
    Check("lengths", _lengths, ("start",)),
    Check("parallel sizes", _parallel_sizes, ("start",)),
    Check("token budgets", _token_budgets, ("start",)),
    Check("KV pool", _kv_pool, ("start",)),
    Check("memory of a device", device_memory.find_problems, ("start",)),
    Check("memory, disk and ports of this machine", machine.find_problems, ("start", "device", "node")),
    Check("verl's own validation", _verl, ("image",)),
    Check("vLLM's arguments", vllm_command.find_problems_here, ("image",)),
    Check("drafter and sampler", lambda config: speculation.resolve(config)[1], ("device",)),
    Check("Ray cluster", lambda config: cluster.find_problems(config, node_problems), ()),
    Check("weight sync", machine.weight_sync_problems, ("device", "npu")),
)
