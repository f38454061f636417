"""Whether keys, batches, lengths and parallel sizes of a config fit verl and each other."""

import functools
from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from recipe.arguments import FREE_SECTIONS
from recipe.launch.config import verl_configs
from recipe.preflight.device_memory import device_count, longest_sequence, uses_megatron
from recipe.preflight.problem import Problem, did_you_mean
from recipe.preflight.vllm_command import ROLLOUT, key_of

# This recipe's own keys.
OWN = (
    *("assets", "assets_command", "config_name", "drafters", "machine", "routing", "run_dir", "seed", "speculation"),
    "watchdog",
)
# Whose unknown keys others refuse: dataclasses of verl's, vLLM's argument parser, ray.init; or that are handed on to
# functions of the recipe's.
CHECKED_ELSEWHERE = (*FREE_SECTIONS, *(f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout")))
# Sizes of a replica: vLLM's argument, and the key of verl's rollout section.
ENGINE_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
}
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"


def key_problems(config: DictConfig) -> Iterator[Problem]:
    """Keys that verl does not know and would ignore, and values of another type than verl's own."""
    verls = {name: value for name, value in OmegaConf.to_container(config).items() if name not in OWN}
    yield from _unknown(verls, verl_defaults("megatron" if uses_megatron(config) else "dp"), "")


@functools.cache
def verl_defaults(engine: str) -> dict:
    """verl's own ppo_trainer, every key of it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)


def _unknown(found: dict, known: dict, path: str) -> Iterator[Problem]:
    for name in sorted(known.keys() - found.keys()):
        yield Problem("config.value", f"{path}{name} is not there", "leave it in the config")
    for name, value in found.items():
        key = f"{path}{name}"
        if name not in known:
            if not key.startswith(CHECKED_ELSEWHERE):
                yield Problem("config.unknown_key", key, did_you_mean(name, known))
        elif expected := _other_type(value, known[name]):
            yield Problem("config.value", f"{key}={value}", f"expected {expected}")
        elif isinstance(value, dict) and isinstance(known[name], dict) and known[name]:
            yield from _unknown(value, known[name], f"{key}.")


def _other_type(value: Any, default: Any) -> str | None:
    """What is expected in place of a value of another type than verl's default, which may be null."""
    if value == "???" != default:
        return "a value"
    if default is None or (value is None and not isinstance(default, dict)):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return None if type(value) in (int, float) else "a number"
    if isinstance(default, dict):
        return None if isinstance(value, dict) else "keys below it"
    return "text" if type(value) in (bool, int, float) or isinstance(value, dict) else None


def batch_problems(config: DictConfig) -> Iterator[Problem]:
    """Batches that must divide each other; verl says some of it, and only of micro-batches of a fixed size."""
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    devices, filtering = device_count(config), config.algorithm.filter_groups.enable
    train, generated, mini, samples = data.train_batch_size, data.gen_batch_size, actor.ppo_mini_batch_size, rollout.n
    multiples = [(f"data.train_batch_size={train}", train, f"actor.ppo_mini_batch_size={mini}", mini)]
    if not filtering:
        multiples.append((f"data.train_batch_size={train}", train, f"data.gen_batch_size={generated}", generated))
    responses = train * samples
    multiples.append((f"train_batch_size x rollout.n = {responses}", responses, f"{devices} devices", devices))
    for key, is_dynamic, total in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.use_dynamic_bsz, mini * samples // devices),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_use_dynamic_bsz, responses // devices),
    ):
        if (size := OmegaConf.select(config.actor_rollout_ref, key)) and not is_dynamic and responses % devices == 0:
            multiples.append((f"{total} responses of a device", total, f"actor_rollout_ref.{key}={size}", size))
    yield from (Problem("size.divides", f"{one}, {other}") for one, a, other, b in multiples if a % b)
    if filtering and generated < train:
        yield Problem("size.least", f"data.gen_batch_size={generated}, data.train_batch_size={train}")
    if filtering and samples < 2:
        value = f"actor_rollout_ref.rollout.n={samples}: dynamic sampling compares the samples of a prompt"
        yield Problem("size.least", value, "use 2 or more")


def length_problems(config: DictConfig) -> Iterator[Problem]:
    """Lengths and token budgets that are less than the longest response or a step needs."""
    actor, rollout, speculation = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.speculation
    longest, buffer = longest_sequence(config), OmegaConf.select(config, BUFFER)
    settings, split = (
        (actor.megatron, "context_parallel_size")
        if uses_megatron(config)
        else (actor.fsdp_config, "ulysses_sequence_parallel_size")
    )
    update, model_key = actor.ppo_max_token_len_per_gpu * settings[split], key_of("max_model_len", config)
    model = OmegaConf.select(config, model_key)
    if isinstance(model, int) and model < longest:
        yield Problem("size.least", f"{model_key}={model}, {longest} tokens of the longest prompt and response")
    if actor.use_dynamic_bsz and update < longest:
        value = f"actor.ppo_max_token_len_per_gpu x {split} = {update}, {longest} tokens of the longest sequence"
        yield Problem("size.least", value)
    step = rollout.max_num_seqs * (1 + speculation.num_speculative_tokens * (speculation.method != "off"))
    if rollout.max_num_batched_tokens < step:
        value = f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}, {step} of a step of full decoding"
        yield Problem("size.least", f"{value} (max_num_seqs x (1 + num_speculative_tokens))")
    if buffer.enable and not 0 < buffer.len <= config.data.max_response_length:
        expected = f"1 to data.max_response_length={config.data.max_response_length}"
        yield Problem("config.value", f"{BUFFER}.len={buffer.len}, expected {expected}")


def parallel_problems(config: DictConfig) -> Iterator[Problem]:
    """Devices that cannot be divided among replicas or Megatron's ranks."""
    rollout, devices = config.actor_rollout_ref.rollout, device_count(config)
    tensor, data = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    sizes = [(f"{ROLLOUT}.tensor_model_parallel_size={tensor} x data_parallel_size={data}", devices, tensor * data)]
    if uses_megatron(config):
        found = config.actor_rollout_ref.actor.megatron
        pipeline, experts = found.pipeline_model_parallel_size, found.expert_model_parallel_size
        model = found.tensor_model_parallel_size * pipeline * found.context_parallel_size
        sizes.append((f"actor.megatron: tensor x pipeline x context = {model}", devices, model))
        if devices % model == 0:
            sizes.append((f"actor.megatron.expert_model_parallel_size={experts}", devices // pipeline, experts))
    yield from (Problem("size.divides", f"{total} devices, {said}") for said, total, size in sizes if total % size)
    for name, size in rollout.engine_kwargs.vllm.items():
        # verl places its workers by the keys of its own, whatever vLLM is told here.
        if (own := ENGINE_SIZES.get(name)) and size != rollout[own]:
            value = f"{key_of(name, config)}={size}: verl places its workers by rollout.{own}={rollout[own]}"
            yield Problem("config.refused", value, "remove it, set that one")


def metric_problems(config: DictConfig) -> Iterator[Problem]:
    """A metric that the recipe's reward does not give. What a user's gives is known after the first round."""
    from recipe.trainer import reward

    wanted, buffer = config.algorithm.filter_groups.metric, config.reward.reward_kwargs.overlong_buffer_cfg
    known = ("reward", *reward.METRICS, *(("overlong", "overlong_reward") if buffer.enable and buffer.log else ()))
    is_own = config.reward.custom_reward_function.path == f"pkg://{reward.__name__}"
    if config.algorithm.filter_groups.enable and is_own and wanted not in known:
        remedy = did_you_mean(wanted, known) or f"set it to one of {', '.join(known)}"
        yield Problem("batch.metric", f"algorithm.filter_groups.metric={wanted}", remedy)
