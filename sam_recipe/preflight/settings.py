"""What a config says: whether keys, sizes, data and models are there, whole, and fit each other.

Each check yields lines: what was found, what was expected, what to do, and a code in brackets.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from safetensors import SafetensorError, safe_open

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.reading import ReadError, expect, json_object
from sam.trained_drafter import settings_of, wrong_kind
from sam_recipe.arguments import AGENT, AGENT_LOOPS, FREE_SECTIONS, did_you_mean
from sam_recipe.launch.config import verl_configs
from sam_recipe.preflight.machine import device_count, first_line, longest_sequence, uses_megatron
from sam_recipe.trainer import reward

# This project's own keys, beside verl's; SpeculationConfig has looked at those of `speculation`.
OWN = {
    "drafters": {"draft_model": None},
    "machine": {"disk_gib": None, "memory_gib": None, "threads": None},
    "routing": {"chunk_tokens": None, "policy": None},
    "watchdog": {"weight_sync_seconds": None},
    **dict.fromkeys("assets assets_command config_name run_dir seed speculation".split()),
}
# Whose unknown keys others refuse: dataclasses of verl's, vLLM's argument parser, ray.init; or that are handed on.
CHECKED_ELSEWHERE = (*FREE_SECTIONS, *(f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout")))
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
OWN_REWARD = f"pkg://{reward.__name__}"
KINDS = {bool: "true or false", int: "a number", float: "a number", dict: "keys below it"}


def keys(config: DictConfig) -> Iterator[str]:
    """Keys that nothing reads, and values of another type than verl's own.

    A section of a user's own config, which other keys may refer to, is none unless its name is like one of theirs.
    """
    content = OmegaConf.to_container(config)
    known = verl_defaults("megatron" if uses_megatron(config) else "dp")
    known = known | {name: below for name, below in OWN.items() if name in content}
    meant = {name: value for name, value in content.items() if name in known or did_you_mean(name, known)}
    yield from _unlike(meant, known, "")


@functools.cache
def verl_defaults(engine: str) -> dict:
    """verl's own ppo_trainer, every key of it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)


def _unlike(found: dict, known: dict, path: str) -> Iterator[str]:
    for name in sorted(known.keys() - found.keys()):
        if path.rstrip(".") not in OWN:  # of which a config may have a part
            yield f"{path}{name} is not there: leave it in the config [config.value]"
    for name, value in found.items():
        key, default = f"{path}{name}", known.get(name)
        wanted = None if default is None else KINDS.get(type(default), "text")
        kind = KINDS.get(type(value), "text")
        is_null = value is None and wanted != KINDS[dict]
        if name not in known and not key.startswith(CHECKED_ELSEWHERE):
            remedy = did_you_mean(name, known) or "remove it"
            yield f"{key}: neither verl 0.9.1 nor this project reads the key: {remedy} [config.unknown_key]"
        elif (wanted and not is_null and kind != wanted) or value == "???" != default:
            yield f"{key}={value}: expected {wanted or 'a value'}: change it [config.value]"
        elif isinstance(value, dict) and default:
            yield from _unlike(value, default, f"{key}.")


def key_of(argument: str, config: DictConfig) -> str:
    """The key that a user sets an argument of vLLM's with."""
    rollout = config.actor_rollout_ref.rollout
    is_verls = argument in rollout and argument not in rollout.engine_kwargs.vllm
    return f"{ROLLOUT}.{argument}" if is_verls else f"{ROLLOUT}.engine_kwargs.vllm.{argument}"


def _multiples(*sizes: tuple[str, int, str, int]) -> Iterator[str]:
    for said, total, of, size in sizes:
        if total % size:
            yield f"{said}, {of}: the first must be a multiple of the second: change one [size.divides]"


def batches(config: DictConfig) -> Iterator[str]:
    """Batches that must divide each other; verl says some of it, and only of micro-batches of a fixed size."""
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    devices, filtering = device_count(config), config.algorithm.filter_groups.enable
    train, generated, mini, samples = data.train_batch_size, data.gen_batch_size, actor.ppo_mini_batch_size, rollout.n
    responses, said = train * samples, f"data.train_batch_size={train}"
    yield from _multiples(
        (said, train, f"actor.ppo_mini_batch_size={mini}", mini),
        (said, train, f"data.gen_batch_size={generated}", 1 if filtering else generated),
        (f"train_batch_size x rollout.n = {responses}", responses, f"{devices} devices", devices),
    )
    for key, is_dynamic, total in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.use_dynamic_bsz, mini * samples // devices),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_use_dynamic_bsz, responses // devices),
    ):
        if (size := OmegaConf.select(config.actor_rollout_ref, key)) and not is_dynamic and responses % devices == 0:
            yield from _multiples((f"{total} responses of a device", total, f"actor_rollout_ref.{key}={size}", size))
    if filtering and generated < train:
        yield f"data.gen_batch_size={generated}: expected data.train_batch_size={train} or more: raise it [size.least]"
    if filtering and samples < 2:
        yield f"{ROLLOUT}.n={samples}: dynamic sampling compares the samples of a prompt: use 2 or more [size.least]"


def lengths(config: DictConfig) -> Iterator[str]:
    """Lengths and token budgets that are less than the longest response or a step needs."""
    actor, rollout, speculation = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.speculation
    longest, buffer = longest_sequence(config), OmegaConf.select(config, BUFFER)
    model_key = key_of("max_model_len", config)
    split = "context_parallel_size" if uses_megatron(config) else "ulysses_sequence_parallel_size"
    update = actor.ppo_max_token_len_per_gpu * (actor.megatron if uses_megatron(config) else actor.fsdp_config)[split]
    step = rollout.max_num_seqs * (1 + speculation.num_speculative_tokens * (speculation.method != "off"))
    of_update = f"actor.ppo_max_token_len_per_gpu x {split} = "
    of_step = "a step of full decoding, max_num_seqs x (1 + num_speculative_tokens)"
    for said, size, least, of in (
        (f"{model_key}=", OmegaConf.select(config, model_key), longest, "the longest prompt and response"),
        (of_update, update, longest * actor.use_dynamic_bsz, "the longest sequence"),
        ("rollout.max_num_batched_tokens=", rollout.max_num_batched_tokens, step, of_step),
    ):
        if isinstance(size, int) and size < least:
            yield f"{said}{size}: expected at least the {least} tokens of {of}: raise it [size.least]"
    if buffer.enable and not 0 < buffer.len <= (most := config.data.max_response_length):
        yield f"{BUFFER}.len={buffer.len}: expected 1 to data.max_response_length={most}: change it [config.value]"


def parallel_sizes(config: DictConfig) -> Iterator[str]:
    """Devices that cannot be divided among replicas or Megatron's ranks."""
    rollout, devices = config.actor_rollout_ref.rollout, device_count(config)
    tensor, data, said = rollout.tensor_model_parallel_size, rollout.data_parallel_size, f"{devices} devices"
    of_replica = f"{ROLLOUT}.tensor_model_parallel_size={tensor} x data_parallel_size={data}"
    yield from _multiples((said, devices, of_replica, tensor * data))
    if uses_megatron(config):
        found = config.actor_rollout_ref.actor.megatron
        pipeline, experts = found.pipeline_model_parallel_size, found.expert_model_parallel_size
        model = found.tensor_model_parallel_size * pipeline * found.context_parallel_size
        yield from _multiples((said, devices, f"actor.megatron: tensor x pipeline x context = {model}", model))
        if devices % model == 0:
            of_experts = f"actor.megatron.expert_model_parallel_size={experts}"
            yield from _multiples((f"{devices // pipeline} devices", devices // pipeline, of_experts, experts))


# Files of data: what scripts/prepare_data.sh makes; and what verl keeps of a response, and hands on with a row: a
# column of the name would take its place.
PREPARED = ("dapo_math_17k", "aime_2024", "gsm8k_train", "gsm8k_test")
TAKEN = {
    *("extra_fields", "global_steps", "metrics", "num_turns", "prompts", "response_mask", "responses", "rm_scores"),
    *("rollout_log_probs", "routed_experts", "sampling_params", "session_id", "trace", "trajectory", "validate"),
}


def data(config: DictConfig) -> Iterator[str]:
    for key, path in data_files(config):
        made = made_by_assets(config, path)
        if not path.is_file():
            others = "make it with bash scripts/prepare_data.sh, or " * (path.stem in PREPARED)
            yield f"{key}={path}: no such file: {made or f'{others}correct {key}'} [data.missing]"
        elif wrong := config.data.custom_cls.path is None and _wrong_parquet(path, config.data.prompt_key):
            yield f"{key}={path}: {wrong}: {made or 'write it as sam_recipe.data does'} [data.wrong_file]"


def data_files(config: DictConfig) -> Iterator[tuple[str, Path]]:
    """Keys and files of the data sets; `None` of a key without a value."""
    for key in ("train_files", "val_files"):
        value = config.data[key]
        for name in (list(value) or [None]) if isinstance(value, ListConfig) else [value]:
            yield f"data.{key}", Path(str(name)).expanduser()


def made_by_assets(config: DictConfig, path: Path) -> str | None:
    """How to make what the config's own assets lack; None: it is not one of them."""
    if "assets" not in config or Path(config.assets).absolute() not in path.absolute().parents:
        return None
    return f"make it with python -m {config.assets_command} --output {config.assets}"


def _wrong_parquet(path: Path, prompt: str) -> str | None:
    """What verl's reader or its reward managers would trip over, in words."""
    import pyarrow.parquet  # a quarter of a second, and only where there are data

    if path.suffix != ".parquet":
        return f"its name ends in {path.suffix or 'nothing'}, .parquet is expected"
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        return first_line(error)
    found, metadata = file.schema_arrow, file.metadata
    for column, expected, needed in (
        ("data_source", "text", "string"),
        (prompt, "a list of messages with role and content", "role content"),
        ("reward_model", "a dictionary with ground_truth", "ground_truth"),
    ):
        if column not in found.names:
            return f"no column {column}"
        kind = found.field(column).type
        # Of a dictionary-encoded column and of a list's entries value_type is their own type.
        inner = getattr(kind, "value_type", None if column == prompt else kind)
        names = {str(inner).removeprefix("large_"), *(field.name for field in getattr(inner, "fields", ()))}
        if not names.issuperset(needed.split()):
            return f"column {column} holds {kind}, expected {expected}"
    if taken := sorted(TAKEN.intersection(found.names)):
        return f"column {taken[0]} has the name of one that verl writes, rename it"
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(place) for group in groups for place in range(metadata.num_columns)]
    roles = [
        one for one in chunks if one.statistics and re.fullmatch(rf"{re.escape(prompt)}\..*role", one.path_in_schema)
    ]
    # A row without messages is counted as a message without a role.
    if empty := sum(one.statistics.null_count or 0 for one in roles):
        return f"{empty} of {metadata.num_rows} rows have no message in {prompt}"
    return None if metadata.num_rows else "no rows"


def _column_values(path: Path, column: str) -> list[Any]:
    """Different values of a column; none of a file that cannot be read, of which `data` tells."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path, columns=[column])[column].unique().to_pylist()
    except (OSError, ValueError, KeyError):
        return []


def agent_loops_and_rewards_of_the_data(config: DictConfig) -> Iterator[str]:
    """Agent loops and data sources that the config or its data name, and that nothing known here has."""
    if config.data.custom_cls.path:
        return  # a dataset may name others, and its file register them
    names = ["single_turn_agent", "tool_agent"]  # verl's own
    try:
        if path := OmegaConf.select(config, AGENT_LOOPS):
            names += [name for name, _ in entries(path, "", "name", "_target_")]
    except (OSError, ValueError):
        return  # users_code says so
    wanted = [(f"{AGENT}.default_agent_loop", OmegaConf.select(config, f"{AGENT}.default_agent_loop"))]
    # The recipe's own reward knows some data sources; another one may know others.
    is_own = config.reward.custom_reward_function.path == OWN_REWARD
    for key, file in data_files(config):
        wanted += [(f"{key}={file}: agent_name", name) for name in _column_values(file, "agent_name")]
        for source in _column_values(file, "data_source") if is_own else ():
            if isinstance(source, str | None) and not reward.knows(source):  # `data` has other types
                said = "the recipe's reward does not know it: set reward.custom_reward_function.path to one of your own"
                yield f"{key}={file}: data_source={source}: {said} [data.source]"
    for said, name in (one for one in wanted if one[1] not in names):
        remedy = did_you_mean(name, names) or f"name one of {', '.join(names)}, or add it to {AGENT_LOOPS}"
        yield f"{said}={name}: verl would not find it: {remedy} [code.missing]"


def entries(path: str, place: str, *fields: str) -> list[list[str]]:
    """The fields of each entry of the list in a user's YAML file, below the key `place` where that is given.

    Raises:
        FileNotFoundError, ValueError: the file has another form.
    """
    try:
        listed = OmegaConf.load(path)
        return [[str(one[field]) for field in fields] for one in (listed[place] if place else listed)]
    except FileNotFoundError:
        raise
    except Exception as error:  # what YAML's parser raises has many classes
        expected = f"{place}, a list" if place else "a list"
        raise ValueError(f"expected {expected} of entries with {' and '.join(fields)} ({first_line(error)})") from None


# The model, its trained drafter and what they wrote before.
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREPARE = "bash scripts/prepare_model.sh"


def model_of(config: DictConfig) -> Path:
    return Path(config.actor_rollout_ref.model.path).expanduser()


def model(config: DictConfig) -> Iterator[str]:
    has_critic = config.critic.enable or (config.critic.enable is None and config.algorithm.adv_estimator == "gae")
    for key, is_read, needed in (
        *((f"{MODEL}.{name}_path", True, "") for name in ("hf_config", "lora_adapter", "tokenizer")),
        ("trainer.resume_from_path", True, ""),
        ("critic.model.path", has_critic, "config.json"),
        ("reward.reward_model.model_path", config.reward.reward_model.enable, "config.json"),
    ):
        name, is_there = OmegaConf.select(config, key), Path.is_file if needed else Path.is_dir
        if is_read and (name or needed) and not is_there(Path(str(name)).expanduser() / needed):
            remedy = f"point {key} at the folder of a model" if needed else f"correct {key}"
            yield f"{key}={name}: no {needed or 'such folder'}: {remedy} [model.missing]"
    folder, key = model_of(config), f"{MODEL}.path"
    if not (folder / "config.json").is_file():
        yield f"{key}={folder}: no config.json: {_model_maker(config, key, folder)} [model.missing]"
        return
    # A tokenizer may be stored as either; Qwen3's folder has both.
    for names in (("tokenizer_config.json",), ("tokenizer.json", "vocab.json")):
        if not any((folder / name).is_file() for name in names):
            yield f"{key}={folder}: no {' and no '.join(names)}: {PREPARE}, or set {key} [model.missing]"
    yield from weights(folder)


def _model_maker(config: DictConfig, key: str, path: Path) -> str:
    if made := made_by_assets(config, path):
        return made
    parts = path.parts
    if path.exists() or path.is_absolute() or len(parts) != 2 or parts[0] in (".", "..", "~"):
        return f"point {key} at the folder of a model, {PREPARE} fetches one"
    # models/Qwen3-32B is a config's own, OWNER/NAME is a hub's.
    name = parts[1] if parts[0] == "models" else str(path)
    return f"{PREPARE} {name} fetches it to models/{parts[1]}, set {key} to that folder"


def weights(folder: Path) -> Iterator[str]:
    """Whether a model's weights are all there, to the last byte: headers alone are read, 470 GB take seconds."""
    again = f"remove it, {PREPARE} goes on where a download stopped"
    try:
        shards = _shards(folder)
    except ReadError as error:
        yield f"{error}: {again} [model.damaged]"
        return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        said = f"{len(missing)} of {len(shards)} shards of {INDEX} are missing, the first {missing[0]}"
        said = said if shards[missing[0]] else f"neither {INDEX} nor {SINGLE}"
        yield f"{folder}: {said}: {PREPARE} goes on where a download stopped [model.missing]"
        return
    for path, tensors in sorted((folder / shard, tensors) for shard, tensors in shards.items()):
        try:
            with safe_open(path, "np") as shard:  # compares the file's size with its header's
                lacking = tensors - set(shard.keys())
            said = f"{len(lacking)} tensors of {INDEX} are not in it" if lacking else None
        except (SafetensorError, OSError) as error:
            said = f"not a whole safetensors file, {path.stat().st_size:,} bytes ({error})"
        if said:
            yield f"{path}: {said}: {again} [model.damaged]"


def _shards(folder: Path) -> dict[str, set[str]]:
    """The tensors of every shard that the index names; of a model without an index one file, of whatever is in it."""
    shards: dict[str, set[str]] = {}
    if not (path := folder / INDEX).exists():
        return {SINGLE: set()}
    places = json_object(path).get("weight_map")
    names = places.values() if isinstance(places, dict) else ()
    is_right = bool(names) and all(isinstance(one, str) and one for one in names)
    expect(is_right, f"{path}, weight_map", "tensors and the names of their shards", places)
    for tensor, shard in places.items():
        shards.setdefault(shard, set()).add(tensor)
    return shards


def tokenizer(config: DictConfig) -> Iterator[str]:
    """Loads the tokenizer and lays out a prompt, as every rollout does. transformers takes seconds to import."""
    if not ((folder := model_of(config)) / "tokenizer_config.json").is_file():
        return  # `model` says so
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded.chat_template = config.actor_rollout_ref.model.custom_chat_template or loaded.chat_template
        loaded.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    except Exception as error:
        said = f"the tokenizer does not load, or lays out no prompt ({first_line(error)})"
        yield f"{MODEL}.path={folder}: {said}: fetch the model again [model.tokenizer]"


def history_of_responses(config: DictConfig) -> Iterator[str]:
    """Whether responses can be kept where the config says, and those that are there are this model's."""
    if (folder := config.speculation.history_path) is None:
        return
    from sam.history import database  # only where there is a history

    tokenizer = database.fingerprint(str(path)) if (path := model_of(config)).is_dir() else None
    try:
        database.check_folder(Path(folder), tokenizer)
    except database.HistoryError as error:
        said, _, _ = str(error).rpartition(": ")
        yield f"speculation.history_path: {said}: choose another speculation.history_path [history.unusable]"


LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def lacks_drafter(config: DictConfig) -> bool:
    """Whether a trained drafter is asked for that is not there."""
    has_one = config.speculation.method in WITH_DRAFT_MODEL
    return has_one and not (Path(config.speculation.draft_model) / "config.json").is_file()


def draft_model(config: DictConfig) -> Iterator[str]:
    """Whether speculation's trained drafter is there and can draft for the model, on one rank and this device."""
    speculation, rollout = config.speculation, config.actor_rollout_ref.rollout
    if speculation.method not in WITH_DRAFT_MODEL:
        return
    folder, target = Path(speculation.draft_model), settings_of(model_of(config))
    # Data-parallel engines of a dense model are independent.
    for name in ("tensor_model_parallel_size", *["data_parallel_size"] * any(target.get(one) for one in EXPERTS)):
        if (size := rollout[name]) > 1:
            wrong = "a trained drafter's passes run on one rank"
            yield f"{ROLLOUT}.{name}={size}: {wrong}: set it to 1, or choose speculation=sam [drafter.ranks]"
    key, method = f"speculation.draft_model={folder}", SpeculationConfig.from_dict(dict(speculation)).trained_method()
    if lacks_drafter(config):
        made = f"make it with sam distil --assets {config.get('assets', 'DIR')}"
        is_head = speculation.method == "eagle3"
        remedy = "point the key at a head that was trained for this model" if is_head else made
        yield f"{key}: no config.json: {remedy} [drafter.missing]"
    elif found := wrong_kind(folder, method):
        remedy = "choose the other of draft_model and eagle3, or hybrid"
        yield f"{key} holds {found}, speculation={method}: {remedy} [drafter.unlike]"
    else:
        yield from weights(folder)
        for said in _cannot_draft(settings_of(folder), target, config, method) if target else ():
            wrong = "it cannot draft for this model or these prompts"
            yield f"{key}: {said}: {wrong}: choose another, or distil one [drafter.unlike]"


def _cannot_draft(draft: dict, target: dict, config: DictConfig, method: str) -> Iterator[str]:
    """What vLLM does not say before it loads the weights, or not at all."""
    alike = {"vocab_size": "vocab_size"}  # drafts are token ids of the target
    if config.trainer.device == "cpu":  # vLLM's attention there plans both models' passes with the target's heads
        alike |= {name: name for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    if method == "eagle3":  # it reads the target's hidden states
        alike["target_hidden_size" if "target_hidden_size" in draft else "hidden_size"] = "hidden_size"
    for name, of_target in alike.items():
        if (found := draft.get(name)) != (wanted := target.get(of_target)):
            yield f"{name}={found}, the model's is {wanted}"
    needed = config.speculation.num_speculative_tokens + config.data.max_prompt_length
    if needed > (positions := draft.get("max_position_embeddings") or needed):
        yield f"max_position_embeddings={positions}, num_speculative_tokens + data.max_prompt_length = {needed}"
    if method == "eagle3" and type(last := target.get("num_hidden_layers")) is int:
        named = draft.get(LAYERS_READ) or (draft.get("eagle_config") or {}).get(LAYERS_READ)
        layers = named or (2, last // 2, last - 3)  # vLLM's own choice
        if not all(type(layer) is int and 0 <= layer <= last for layer in layers) or len({*layers}) != len(layers):
            yield f"{LAYERS_READ}={list(layers)}, expected different ones, the model has {last} layers"
