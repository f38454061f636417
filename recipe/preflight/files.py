"""Whether the data sets and the model that a config names are there, whole, and of the right form."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.preflight import weights
from recipe.preflight.problem import Problem, first_line
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.trained_drafter import settings_of, wrong_kind

PREPARED = ("dapo_math_17k", "aime_2024", "gsm8k_train", "gsm8k_test")  # by scripts/prepare_data.sh
# What verl keeps of a response, and hands on with a row: a column of the name would take its place.
TAKEN = {
    *("extra_fields", "global_steps", "metrics", "num_turns", "prompts", "response_mask", "responses", "rm_scores"),
    *("rollout_log_probs", "routed_experts", "sampling_params", "session_id", "trace", "trajectory", "validate"),
}
# What a tokenizer may be stored as; Qwen3's folder has both.
VOCABULARIES = ("tokenizer.json", "vocab.json")


def data_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """But of what lies below the directory `to_be_built`."""
    for key in ("train_files", "val_files"):
        value = config.data[key]
        for name in (list(value) or [None]) if isinstance(value, ListConfig) else [value]:
            path = Path(str(name)).expanduser()
            if _is_below(path, to_be_built):
                continue
            if not path.is_file():
                made = "make it with bash scripts/prepare_data.sh, or " * (path.stem in PREPARED)
                remedy = _made_by_assets(config, path) or f"{made}correct data.{key}"
                yield Problem("data.missing", f"data.{key}={name}", remedy)
            elif wrong := _wrong_parquet(path, config):
                remedy = _made_by_assets(config, path) or "write it as recipe.data does"
                yield Problem("data.wrong_file", f"data.{key}={name}: {wrong}", remedy)


def _is_below(path: Path, folder: Path | None) -> bool:
    """Either may be relative."""
    return folder is not None and folder.absolute() in path.absolute().parents


def _wrong_parquet(path: Path, config: DictConfig) -> str | None:
    """What verl's reader or its reward managers would trip over, in words."""
    import pyarrow.parquet  # a quarter of a second, and only where there are data

    if config.data.custom_cls.path is not None:
        return None
    if path.suffix != ".parquet":
        return f"its name ends in {path.suffix or 'nothing'}, .parquet is expected"
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        return first_line(error)
    prompt, found = config.data.prompt_key, file.schema_arrow
    for column, expected, is_right in (
        ("data_source", "text", _is_text),
        (prompt, "a list of messages with role and content", _is_messages),
        ("reward_model", "a dictionary with ground_truth", lambda kind: "ground_truth" in _fields(kind)),
    ):
        if column not in found.names:
            return f"no column {column}"
        if not is_right(kind := found.field(column).type):
            return f"column {column} holds {kind}, expected {expected}"
    if taken := sorted(TAKEN.intersection(found.names)):
        return f"column {taken[0]} has the name of one that verl writes, rename it"
    if not file.metadata.num_rows:
        return "no rows"
    empty = sum(_nulls(file.metadata.row_group(group), f"{prompt}.") for group in range(file.num_row_groups))
    return f"{empty} of {file.metadata.num_rows} rows have no message in {prompt}" if empty else None


def _is_text(kind: Any) -> bool:
    return str(getattr(kind, "value_type", kind)) in ("string", "large_string")  # a dictionary's values, or its own


def _fields(kind: Any) -> list[str]:
    return [field.name for field in getattr(kind, "fields", ())]


def _is_messages(kind: Any) -> bool:
    return {"role", "content"} <= {*_fields(getattr(kind, "value_type", None))}


def _nulls(rows: Any, prefix: str) -> int:
    """Messages without a role, as which rows without messages are counted."""
    columns = [rows.column(index) for index in range(rows.num_columns)]
    roles = [one for one in columns if one.path_in_schema.startswith(prefix) and one.path_in_schema.endswith(".role")]
    return sum(one.statistics.null_count or 0 for one in roles if one.statistics)


def _made_by_assets(config: DictConfig, path: Path) -> str | None:
    """How to make what the config's own assets lack; None: it is not one of them."""
    if "assets" not in config or not _is_below(path, Path(config.assets)):
        return None
    return f"make it with python -m {config.assets_command} --output {config.assets}"


def _other_models(config: DictConfig) -> dict[str, str]:
    """Models besides the policy that a run loads, by key."""
    models = {}
    if config.critic.enable or (config.critic.enable is None and config.algorithm.adv_estimator == "gae"):
        models["critic.model.path"] = config.critic.model.path
    if config.reward.reward_model.enable:
        models["reward.reward_model.model_path"] = config.reward.reward_model.model_path
    return models


def _model_maker(config: DictConfig, key: str, path: Path) -> str:
    if made := _made_by_assets(config, path):
        return made
    parts = path.parts
    if path.exists() or path.is_absolute() or len(parts) != 2 or parts[0] in (".", "..", "~"):
        return f"point {key} at the folder of a model, bash scripts/prepare_model.sh fetches one"
    # models/Qwen3-32B is a config's own, OWNER/NAME is a hub's.
    name = parts[1] if parts[0] == "models" else str(path)
    return f"bash scripts/prepare_model.sh {name} fetches it to models/{parts[1]}, set {key} to that folder"


def model_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """None for a model below the directory `to_be_built`."""
    of_model = (f"actor_rollout_ref.model.{name}_path" for name in ("hf_config", "lora_adapter", "tokenizer"))
    for key in (*of_model, "trainer.resume_from_path"):
        if (name := OmegaConf.select(config, key)) and not Path(str(name)).expanduser().is_dir():
            yield Problem("model.missing", f"{key}={name}: no such folder", f"correct {key}")
    for key, name in _other_models(config).items():
        if not (Path(str(name)).expanduser() / "config.json").is_file():
            yield Problem("model.missing", f"{key}={name}: no config.json", f"point {key} at the folder of a model")
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    key = "actor_rollout_ref.model.path"
    if _is_below(model, to_be_built):
        return
    if not (model / "config.json").is_file():
        yield Problem("model.missing", f"{key}={model}: no config.json", _model_maker(config, key, model))
        return
    if not (model / "tokenizer_config.json").is_file():
        yield Problem("model.missing", f"{key}={model}: no tokenizer_config.json")
    elif not any((model / name).is_file() for name in VOCABULARIES):
        yield Problem("model.missing", f"{key}={model}: neither {' nor '.join(VOCABULARIES)}")
    yield from weights.find_problems(model)


HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
SPLIT = ("num_attention_heads", "intermediate_size")  # over tensor-parallel ranks
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def trained_method(config: DictConfig) -> str | None:
    """What vLLM calls speculation's trained drafter; None without one."""
    if config.speculation.method not in WITH_DRAFT_MODEL:
        return None
    return SpeculationConfig.from_dict(OmegaConf.to_container(config.speculation)).trained_method()


def lacks_drafter(config: DictConfig) -> bool:
    """Whether a trained drafter is asked for that is not there."""
    return trained_method(config) is not None and not (Path(config.speculation.draft_model) / "config.json").is_file()


def draft_model_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """Whether speculation's draft model is there and can draft for the model, on these ranks and this device."""
    if (method := trained_method(config)) is None:
        return
    if config.trainer.device == "npu":
        yield Problem("drafter.device", f"speculation={config.speculation.method}, trainer.device=npu")
    folder, model = Path(config.speculation.draft_model), Path(config.actor_rollout_ref.model.path).expanduser()
    yield from _ranks(config.actor_rollout_ref.rollout, settings_of(model))
    if _is_below(folder, to_be_built):
        return
    key = f"speculation.draft_model={folder}"
    if lacks_drafter(config):
        yield Problem("drafter.missing", f"{key}: no config.json", _draft_maker(config))
        return
    if found := wrong_kind(folder, method):
        yield Problem("drafter.kind", f"{key} holds {found}, speculation={method}")
        return
    yield from weights.find_problems(folder)
    # A model that is still to be built may be another one's yet; one that is missing model_problems speaks of.
    if not _is_below(model, to_be_built) and (model / "config.json").is_file():
        yield from _unlike(key, settings_of(folder), settings_of(model), config)


def _ranks(rollout: DictConfig, target: dict) -> Iterator[Problem]:
    """Those that cannot run a draft model's passes together. Data-parallel engines of a dense model are independent."""
    has_experts = any(target.get(name) for name in EXPERTS)
    for key in ("pipeline_model_parallel_size", "data_parallel_size"):
        if (size := rollout.get(key) or 1) > 1 and (has_experts or key != "data_parallel_size"):
            why = " of a model with experts" * (key == "data_parallel_size")
            yield Problem("drafter.ranks", f"actor_rollout_ref.rollout.{key}={size}{why}")


def _undivided(key: str, draft: dict, ranks: int) -> Iterator[Problem]:
    """What vLLM cannot divide among tensor-parallel ranks, as its ModelConfig and its layers have it."""
    named = f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}"
    for name in SPLIT:
        if (size := draft.get(name)) and size % ranks:
            yield Problem("drafter.split", f"{key}: {name}={size}, {named}")
    if (size := draft.get("num_key_value_heads")) and max(size, ranks) % min(size, ranks):
        yield Problem("drafter.split", f"{key}: num_key_value_heads={size}, {named}")


def _draft_maker(config: DictConfig) -> str | None:
    is_head = config.speculation.method == "eagle3"
    if "assets" in config:
        return f"make it with python -m recipe.draft_model --assets {config.assets}" + " --kind eagle3" * is_head
    return "point the key at a head that was trained for this model" if is_head else None


def _unlike(key: str, draft: dict, target: dict, config: DictConfig) -> Iterator[Problem]:
    if (found := draft.get("vocab_size")) != (wanted := target.get("vocab_size")):
        yield Problem("drafter.vocabulary", f"{key}: vocab_size={found}, the model's is {wanted}")
    for name in HEADS:
        if config.trainer.device == "cpu" and (found := draft.get(name)) != (wanted := target.get(name)):
            yield Problem("drafter.heads", f"{key}: {name}={found}, the model's is {wanted}")
    yield from _undivided(key, draft, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
    if trained_method(config) == "eagle3":
        yield from _unlike_head(key, draft, target)
    drafted, at_once = config.speculation.num_speculative_tokens, draft.get("n_predict")
    if at_once and drafted > at_once and drafted % at_once:
        yield Problem("drafter.tokens", f"speculation.num_speculative_tokens={drafted}, {key}: n_predict={at_once}")
    positions, prompt = draft.get("max_position_embeddings"), config.data.max_prompt_length
    if (needed := prompt + config.speculation.num_speculative_tokens) > (positions or needed):
        value = (
            f"{key}: max_position_embeddings={positions}, num_speculative_tokens + data.max_prompt_length = {needed}"
        )
        yield Problem("drafter.positions", value)


def _layers_named(head: dict) -> list[int] | None:
    return head.get(LAYERS_READ) or (head.get("eagle_config") or {}).get(LAYERS_READ)


def layers_read(folder: Path) -> int:
    """How many of the target's layers an EAGLE3 head reads: vLLM takes three where its config.json names none."""
    return len(_layers_named(settings_of(folder)) or range(3))


def _unlike_head(key: str, head: dict, target: dict) -> Iterator[Problem]:
    """What an EAGLE3 head reads of the target, which has it or not."""
    read = "target_hidden_size" if "target_hidden_size" in head else "hidden_size"
    if (found := head.get(read)) != (wanted := target.get("hidden_size")):
        yield Problem("drafter.hidden_size", f"{key}: {read}={found}, the model's is {wanted}")
    last = target.get("num_hidden_layers")
    if type(last) is not int:
        return  # no model that vLLM would load
    # vLLM's own: 2, the middle and the last but two.
    layers = _layers_named(head) or (2, last // 2, last - 3)
    if not all(type(layer) is int and 0 <= layer <= last for layer in layers) or len({*layers}) != len(layers):
        yield Problem("drafter.layers", f"{key}: {LAYERS_READ}={list(layers)}, the model has {last} layers")


def history_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """Whether responses can be kept where the config says, and those that are there are this model's."""
    if (folder := config.speculation.history_path) is None:
        return
    from sam.history import database, fingerprint  # only where there is a history

    model = Path(config.actor_rollout_ref.model.path).expanduser()
    written_in = None if _is_below(model, to_be_built) else fingerprint.fingerprint(str(model))
    try:
        database.check_folder(Path(folder), written_in)
    except database.HistoryError as error:
        value, _, _ = str(error).rpartition(": ")
        yield Problem("history.unusable", f"speculation.history_path: {value}")


def tokenizer_problems(config: DictConfig) -> Iterator[Problem]:
    """Loads the tokenizer and lays out a prompt, as every rollout does. transformers takes seconds to import."""
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    if not (model / "tokenizer_config.json").is_file():
        return  # model_problems says so
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    except Exception as error:
        yield Problem("model.tokenizer", f"actor_rollout_ref.model.path={model}: {first_line(error)}")
