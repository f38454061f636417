"""What a config says: whether keys, sizes, data and models are there, whole, and fit each other.

Each check yields lines: what was found, what was expected, what to do, and a code in brackets.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from safetensors import SafetensorError, safe_open

from recipe.sam_dapo.arguments import FREE_SECTIONS, did_you_mean
from recipe.sam_dapo.launch.config import verl_configs
from recipe.sam_dapo.launch.sharing import METHODS as DRAFTING_FROM_TEXT
from recipe.sam_dapo.preflight.device_memory import device_count, longest_sequence, uses_megatron
from recipe.sam_dapo.preflight.machine import first_line
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.reading import ReadError, expect, json_object
from sam.trained_drafter import wrong_kind

# This project's own keys, beside verl's; SpeculationConfig has looked at those of `speculation`.
OWN = {
    "drafters": {"draft_model": None, "eagle3": None},
    "machine": {"disk_gib": None, "memory_gib": None, "threads": None},
    "routing": {"chunk_tokens": None, "policy": None},
    "watchdog": {"weight_sync_seconds": None},
    **dict.fromkeys("assets assets_command config_name run_dir seed speculation".split()),
}
# Whose unknown keys others refuse: dataclasses of verl's, vLLM's argument parser, ray.init; or that are handed on.
CHECKED_ELSEWHERE = (*FREE_SECTIONS, "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout")
LEGACY = ("custom_reward_function.", "reward_model.", "sandbox_fusion.")  # which verl's V1 trainer does not read
TRAIN_BATCH = "data.train_batch_size"
LONGEST = "the longest prompt and response"
KINDS = {bool: "true or false", int: "a number", float: "a number", dict: "keys below it"}


def keys(config: DictConfig) -> Iterator[str]:
    """Keys that nothing reads, and values of another type than verl's own.

    A section of a user's own config, which other keys may refer to, is none unless its name is like one of theirs.
    """
    content = OmegaConf.to_container(config)
    known = _verls_keys("megatron" if uses_megatron(config) else "dp") | OWN
    yield from _unlike({name: content[name] for name in content if name in known or did_you_mean(name, known)}, known)


@functools.cache
def _verls_keys(engine: str) -> dict:
    """Those of verl's own config, with their defaults."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)


def _unlike(section: dict, known: dict, path: str = "") -> Iterator[str]:
    for name, value in section.items():
        key = f"{path}{name}"
        default = known.get(name)
        kind = KINDS.get(type(value), "text")
        wanted = kind if default is None else KINDS.get(type(default), "text")
        if name not in known and not key.startswith(CHECKED_ELSEWHERE):
            remedy = did_you_mean(name, known) or "remove it"
            yield f"{key}: neither verl 0.9.1 nor this project reads the key: {remedy} [config.unknown_key]"
        elif kind != wanted and not (value is None and wanted != KINDS[dict]):
            yield f"{key}={value}: expected {wanted}: change it [config.value]"
        elif isinstance(value, dict) and default:
            yield from _unlike(value, default, f"{key}.")
        elif value is not None and key.startswith(LEGACY):
            yield f"{key}={value}: verl's V1 trainer does not read it: set what is below reward [config.unknown_key]"


def sizes(config: DictConfig) -> Iterator[str]:
    """Batches, lengths and devices that must divide or hold each other; verl says it of some, most after its start."""
    yield from _multiples(config)
    yield from _least(config)


def _multiples(config: DictConfig) -> Iterator[str]:
    """Batches and devices that are split evenly."""

    def check(name: str, total: int, divisor: str, size: int) -> Iterator[str]:
        if total % size:
            numbers = f"{name}={total}, {divisor}={size}"
            yield f"{numbers}: the first must be a multiple of the second: change one [size.divides]"

    data = config.data
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    devices = device_count(config)
    responses = data.train_batch_size * rollout.n
    yield from check(TRAIN_BATCH, data.train_batch_size, "actor.ppo_mini_batch_size", actor.ppo_mini_batch_size)
    if data.gen_batch_size and not config.algorithm.filter_groups.enable:
        yield from check(TRAIN_BATCH, data.train_batch_size, "data.gen_batch_size", data.gen_batch_size)
    yield from check("train_batch_size x rollout.n", responses, "devices", devices)
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    yield from check("devices", devices, "rollout: tensor_model_parallel_size x data_parallel_size", replica)
    if uses_megatron(config):
        ranks = actor.megatron
        model = ranks.tensor_model_parallel_size * ranks.pipeline_model_parallel_size * ranks.context_parallel_size
        yield from check("devices", devices, "actor.megatron: tensor x pipeline x context", model)
    if responses % devices:
        return
    size = actor.ppo_micro_batch_size_per_gpu
    if size and not actor.use_dynamic_bsz:
        updated = actor.ppo_mini_batch_size * rollout.n // devices
        yield from check("responses of an update and a device", updated, "actor.ppo_micro_batch_size_per_gpu", size)
    size = rollout.log_prob_micro_batch_size_per_gpu
    if size and not rollout.log_prob_use_dynamic_bsz:
        computed = responses // devices
        yield from check("responses of a device", computed, "rollout.log_prob_micro_batch_size_per_gpu", size)


def _least(config: DictConfig) -> Iterator[str]:
    """Sizes that hold others."""

    def check(name: str, size: int, least: int, what: str) -> Iterator[str]:
        if size < least:
            yield f"{name}={size}: expected at least {least}, of {what}: raise it [size.least]"

    data = config.data
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    longest = longest_sequence(config)
    if config.algorithm.filter_groups.enable:
        yield from check("data.gen_batch_size", data.gen_batch_size, data.train_batch_size, TRAIN_BATCH)
        yield from check("rollout.n", rollout.n, 2, "dynamic sampling, which compares a prompt's samples")
    if rollout.max_model_len is not None:
        yield from check("rollout.max_model_len", rollout.max_model_len, longest, LONGEST)
    if actor.use_dynamic_bsz:
        ranks = actor.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1)
        if uses_megatron(config):
            ranks = actor.megatron.context_parallel_size
        tokens = actor.ppo_max_token_len_per_gpu * ranks
        yield from check("actor.ppo_max_token_len_per_gpu x its context ranks", tokens, longest, LONGEST)
    drafts = 0 if config.speculation.method == "off" else config.speculation.num_speculative_tokens
    step = rollout.max_num_seqs * (1 + drafts)
    batched = rollout.max_num_batched_tokens
    yield from check("rollout.max_num_batched_tokens", batched, step, "a step of full decoding")
    buffer = config.reward.reward_kwargs.overlong_buffer_cfg
    if buffer.enable:
        response = data.max_response_length
        yield from check("data.max_response_length", response, buffer.len, "overlong_buffer_cfg.len")


def data(config: DictConfig) -> Iterator[str]:
    """Whether data files are there, with the columns that verl reads."""
    for name in ("train_files", "val_files"):
        value = config.data[name]
        files = list(value) if isinstance(value, ListConfig) else [value]
        for file in files or [None]:
            path = Path(str(file)).expanduser()
            made = made_by_assets(config, path)
            if not path.is_file():
                other = f"make it with bash scripts/prepare_data.sh, or correct data.{name}"
                yield f"data.{name}={path}: no such file: {made or other} [data.missing]"
            elif config.data.custom_cls.path is None:
                wrong = _wrong_parquet(path, config.data.prompt_key)
                if wrong:
                    remedy = made or "write it as recipe.sam_dapo.data does"
                    yield f"data.{name}={path}: {wrong}: {remedy} [data.wrong_file]"


def made_by_assets(config: DictConfig, path: Path) -> str | None:
    """How to make what the config's own assets lack; None: it is not one of them."""
    if "assets" not in config or Path(config.assets).absolute() not in path.absolute().parents:
        return None
    return f"make it with python -m {config.assets_command} --output {config.assets}"


def _wrong_parquet(path: Path, prompt: str) -> str | None:
    import pyarrow.parquet  # a quarter of a second, and only where there are data

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        return first_line(error)
    lacking = {"data_source", prompt, "reward_model"}.difference(file.schema_arrow.names)
    if lacking:
        return f"no column {', '.join(sorted(lacking))}"
    return None if file.metadata.num_rows else "no rows"


# The model, its trained drafter and what they wrote before.
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "bash scripts/prepare_model.sh OWNER/NAME fetches one, and goes on where a download stopped"


def model_of(config: DictConfig) -> Path:
    return Path(config.actor_rollout_ref.model.path).expanduser()


def model(config: DictConfig) -> Iterator[str]:
    if (model_of(config) / "config.json").is_file():
        yield from weights(model_of(config))
    else:
        remedy = made_by_assets(config, model_of(config)) or f"{AGAIN}; set the key to its folder"
        yield f"actor_rollout_ref.model.path={model_of(config)}: no config.json: {remedy} [model.missing]"


def weights(folder: Path) -> Iterator[str]:
    """Whether a model's weights are all there, to the last byte: headers alone are read, 470 GB take seconds."""
    try:
        shards = _shards(folder)
    except ReadError as error:
        yield f"{error}: remove it, {AGAIN} [model.damaged]"
        return
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        problem = f"{len(missing)} of {len(shards)} shards of {INDEX} are missing, the first {missing[0]}"
        yield f"{folder}: {problem}: {AGAIN} [model.missing]"
        return
    for path in (folder / shard for shard in shards):
        try:
            with safe_open(path, "np"):  # compares the file's size with its header's
                pass
        except (SafetensorError, OSError) as error:
            yield f"{path}: not a whole safetensors file ({error}): remove it, {AGAIN} [model.damaged]"


def _shards(folder: Path) -> list[str]:
    """The names of a model's files of weights; ReadError: its index is damaged."""
    index = folder / INDEX
    if not index.exists():
        return [SINGLE]
    places = json_object(index).get("weight_map")
    expect(isinstance(places, dict), f"{index}", "a weight_map", places)
    return sorted({str(place) for place in places.values()})


def draft_model(config: DictConfig) -> Iterator[str]:
    """Whether speculation's trained drafter is there and of the kind; vLLM says whether it fits the model."""
    speculation = config.speculation
    if speculation.method not in WITH_DRAFT_MODEL:
        return
    folder = Path(speculation.draft_model)
    method = SpeculationConfig.from_dict(dict(speculation)).trained_method()
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if size > 1:
        problem = f"rollout.tensor_model_parallel_size={size}: a trained drafter's passes run on one rank"
        yield f"{problem}: set it to 1, or choose speculation=sam [drafter.ranks]"
    if not (folder / "config.json").is_file():
        remedy = "point the key at one that was trained for this model"
        if "assets" in config and speculation.method != "eagle3":
            remedy = f"make it with sam distil --assets {config.assets}"
        yield f"speculation.draft_model={folder}: no config.json: {remedy} [drafter.missing]"
        return
    kind = wrong_kind(folder, method)
    if kind:
        problem = f"speculation.draft_model={folder} holds {kind}, speculation={method}"
        yield f"{problem}: choose the other of draft_model and eagle3, or hybrid [drafter.unlike]"
    else:
        yield from weights(folder)


def corpus(config: DictConfig) -> Iterator[str]:
    """Whether the texts that drafters read when engines start are there, and of the model's tokens."""
    speculation = config.speculation
    described = model_of(config) / "config.json"
    if not speculation.corpus or speculation.method not in DRAFTING_FROM_TEXT or not described.is_file():
        return
    from sam.record.corpus import read_corpus  # only where there is one

    content = json_object(described)
    vocabulary = {**content, **(content.get("text_config") or {})}.get("vocab_size")
    try:
        read_corpus(speculation.corpus, speculation.history_tokens, str(model_of(config)), vocabulary)
    except ReadError as error:
        yield f"speculation.corpus: {error} [corpus.unusable]"


def history_of_responses(config: DictConfig) -> Iterator[str]:
    """Whether responses can be kept where the config says, and those that are there are this model's."""
    path = config.speculation.history_path
    if path is None:
        return
    from sam.history import database  # only where there is a history

    folder = Path(path)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"speculation.history_path={path}: {existing} cannot be written: name another folder [history.unusable]"
    written_in = database.fingerprint(str(model_of(config))) if model_of(config).is_dir() else None
    errors = []
    database.read_files(folder, written_in, lambda connection: None, errors.append)
    for error in errors[:1]:
        yield f"speculation.history_path={path}: {error} [history.unusable]"
