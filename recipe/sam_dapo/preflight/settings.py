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
from recipe.sam_dapo.preflight.machine import device_count, first_line, longest_sequence, uses_megatron
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
CHECKED_ELSEWHERE = (*FREE_SECTIONS, *(f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout")))
LEGACY = ("custom_reward_function.", "reward_model.", "sandbox_fusion.")  # which verl's V1 trainer does not read
KINDS = {bool: "true or false", int: "a number", float: "a number", dict: "keys below it"}


def keys(config: DictConfig) -> Iterator[str]:
    """Keys that nothing reads, and values of another type than verl's own.

    A section of a user's own config, which other keys may refer to, is none unless its name is like one of theirs.
    """
    content, known = OmegaConf.to_container(config), _verls_keys("megatron" if uses_megatron(config) else "dp") | OWN
    yield from _unlike({name: content[name] for name in content if name in known or did_you_mean(name, known)}, known)


@functools.cache
def _verls_keys(engine: str) -> dict:
    """Those of verl's own config, with their defaults."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)


def _unlike(found: dict, known: dict, path: str = "") -> Iterator[str]:
    for name, value in found.items():
        key, default, kind = f"{path}{name}", known.get(name), KINDS.get(type(value), "text")
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
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    devices, filtering, longest = device_count(config), config.algorithm.filter_groups.enable, longest_sequence(config)
    train, mini, responses = data.train_batch_size, actor.ppo_mini_batch_size, data.train_batch_size * rollout.n
    update, scored = actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
    replica, is_whole = rollout.tensor_model_parallel_size * rollout.data_parallel_size, responses % devices == 0
    model, split = 1, actor.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1)
    if uses_megatron(config):
        ranks, split = actor.megatron, actor.megatron.context_parallel_size
        model = ranks.tensor_model_parallel_size * ranks.pipeline_model_parallel_size * split
    for name, total, of, size in (
        ("data.train_batch_size", train, "actor.ppo_mini_batch_size", mini),
        ("data.train_batch_size", train, "data.gen_batch_size", not filtering and data.gen_batch_size),
        ("train_batch_size x rollout.n", responses, "devices", devices),
        ("devices", devices, "rollout: tensor_model_parallel_size x data_parallel_size", replica),
        ("devices", devices, "actor.megatron: tensor x pipeline x context", model),
        ("responses of an update and a device", mini * rollout.n // devices, "actor.ppo_micro_batch_size_per_gpu",
         is_whole and not actor.use_dynamic_bsz and update),
        ("responses of a device", responses // devices, "rollout.log_prob_micro_batch_size_per_gpu",
         is_whole and not rollout.log_prob_use_dynamic_bsz and scored),
    ):  # fmt: skip
        if size and total % size:
            yield f"{name}={total}, {of}={size}: the first must be a multiple of the second: change one [size.divides]"
    buffer = config.reward.reward_kwargs.overlong_buffer_cfg
    step = rollout.max_num_seqs * (1 + config.speculation.num_speculative_tokens * (config.speculation.method != "off"))
    for name, size, least, of in (
        ("data.gen_batch_size", data.gen_batch_size, train * filtering, "data.train_batch_size"),
        ("rollout.n", rollout.n, 2 * filtering, "dynamic sampling, which compares a prompt's samples"),
        ("rollout.max_model_len", rollout.max_model_len, longest, "the longest prompt and response"),
        ("actor.ppo_max_token_len_per_gpu x its context ranks", actor.ppo_max_token_len_per_gpu * split,
         longest * actor.use_dynamic_bsz, "the longest prompt and response"),
        ("rollout.max_num_batched_tokens", rollout.max_num_batched_tokens, step, "a step of full decoding"),
        ("data.max_response_length", data.max_response_length, buffer.len * buffer.enable, "overlong_buffer_cfg.len"),
    ):  # fmt: skip
        if isinstance(size, int) and size < least:
            yield f"{name}={size}: expected at least {least}, of {of}: raise it [size.least]"


def data(config: DictConfig) -> Iterator[str]:
    """Whether data files are there, with the columns that verl reads."""
    for name in ("train_files", "val_files"):
        value = config.data[name]
        for file in (list(value) or [None]) if isinstance(value, ListConfig) else [value]:
            path = Path(str(file)).expanduser()
            said, made = f"data.{name}={path}", made_by_assets(config, path)
            if not path.is_file():
                other = f"make it with bash scripts/prepare_data.sh, or correct data.{name}"
                yield f"{said}: no such file: {made or other} [data.missing]"
            elif wrong := config.data.custom_cls.path is None and _wrong_parquet(path, config.data.prompt_key):
                yield f"{said}: {wrong}: {made or 'write it as recipe.sam_dapo.data does'} [data.wrong_file]"


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
    return f"no column {', '.join(sorted(lacking))}" if lacking else None if file.metadata.num_rows else "no rows"


# The model, its trained drafter and what they wrote before.
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
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
        shards = {SINGLE}
        if (index := folder / INDEX).exists():
            expect(isinstance(places := json_object(index).get("weight_map"), dict), f"{index}", "a weight_map", places)
            shards = {str(place) for place in places.values()}
    except ReadError as error:
        yield f"{error}: remove it, {AGAIN} [model.damaged]"
        return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        said = f"{len(missing)} of {len(shards)} shards of {INDEX} are missing, the first {missing[0]}"
        yield f"{folder}: {said}: {AGAIN} [model.missing]"
        return
    for path in sorted(folder / shard for shard in shards):
        try:
            with safe_open(path, "np"):  # compares the file's size with its header's
                pass
        except (SafetensorError, OSError) as error:
            yield f"{path}: not a whole safetensors file ({error}): remove it, {AGAIN} [model.damaged]"


def draft_model(config: DictConfig) -> Iterator[str]:
    """Whether speculation's trained drafter is there and of the kind; vLLM says whether it fits the model."""
    speculation = config.speculation
    if speculation.method not in WITH_DRAFT_MODEL:
        return
    folder, method = Path(speculation.draft_model), SpeculationConfig.from_dict(dict(speculation)).trained_method()
    if (size := config.actor_rollout_ref.rollout.tensor_model_parallel_size) > 1:
        said = f"rollout.tensor_model_parallel_size={size}: a trained drafter's passes run on one rank"
        yield f"{said}: set it to 1, or choose speculation=sam [drafter.ranks]"
    if not (folder / "config.json").is_file():
        made = f"make it with sam distil --assets {config.get('assets')}"
        is_made = "assets" in config and speculation.method != "eagle3"
        remedy = made if is_made else "point the key at one that was trained for this model"
        yield f"speculation.draft_model={folder}: no config.json: {remedy} [drafter.missing]"
    elif found := wrong_kind(folder, method):
        said = f"speculation.draft_model={folder} holds {found}, speculation={method}"
        yield f"{said}: choose the other of draft_model and eagle3, or hybrid [drafter.unlike]"
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
    if (given := config.speculation.history_path) is None:
        return
    from sam.history import database  # only where there is a history

    folder, errors = Path(given), []
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"speculation.history_path={given}: {existing} cannot be written: name another folder [history.unusable]"
    written_in = database.fingerprint(str(model_of(config))) if model_of(config).is_dir() else None
    database.read_files(folder, written_in, lambda connection: None, errors.append)
    yield from (f"speculation.history_path={given}: {error} [history.unusable]" for error in errors[:1])
