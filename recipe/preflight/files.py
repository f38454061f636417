"""Whether the data sets and the model that a config names are there, whole, and of the right form."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.preflight import weights
from recipe.preflight.problem import Problem, first_line

PREPARED = ("dapo_math_17k", "aime_2024", "gsm8k_train", "gsm8k_test")  # by scripts/prepare_data.sh
# What verl keeps of a response, and hands on with a row: a column of the name would take its place.
TAKEN = {
    *("extra_fields", "global_steps", "metrics", "num_turns", "prompts", "response_mask", "responses", "rm_scores"),
    *("rollout_log_probs", "routed_experts", "sampling_params", "session_id", "trace", "trajectory", "validate"),
}
# What a tokenizer may be stored as; Qwen3's folder has both.
VOCABULARIES = ("tokenizer.json", "vocab.json")


def data_problems(config: DictConfig) -> Iterator[Problem]:
    for key, path in data_files(config):
        if not path.is_file():
            made = "make it with bash scripts/prepare_data.sh, or " * (path.stem in PREPARED)
            yield Problem("data.missing", f"{key}={path}", made_by_assets(config, path) or f"{made}correct {key}")
        elif wrong := _wrong_parquet(path, config):
            remedy = made_by_assets(config, path) or "write it as recipe.data does"
            yield Problem("data.wrong_file", f"{key}={path}: {wrong}", remedy)


def data_files(config: DictConfig) -> Iterator[tuple[str, Path]]:
    """Keys and files of the data sets; `None` of a key without a value."""
    for key in ("train_files", "val_files"):
        value = config.data[key]
        for name in (list(value) or [None]) if isinstance(value, ListConfig) else [value]:
            yield f"data.{key}", Path(str(name)).expanduser()


def column_values(path: Path, column: str) -> list[Any]:
    """Different values of a column; none of a file that cannot be read, of which data_problems tells."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        return file.read([column])[column].unique().to_pylist() if column in file.schema_arrow.names else []
    except (OSError, ValueError):
        return []


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
        # Of a dictionary-encoded column and of a list's entries value_type is their own type.
        ("data_source", "text", lambda kind: str(getattr(kind, "value_type", kind)) in ("string", "large_string")),
        (prompt, "a list of messages with role and content",
         lambda kind: {"role", "content"} <= _fields(getattr(kind, "value_type", None))),
        ("reward_model", "a dictionary with ground_truth", lambda kind: "ground_truth" in _fields(kind)),
    ):  # fmt: skip
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


def _fields(kind: Any) -> set[str]:
    return {field.name for field in getattr(kind, "fields", ())}


def _nulls(rows: Any, prefix: str) -> int:
    """Messages without a role, as which rows without messages are counted."""
    columns = [rows.column(index) for index in range(rows.num_columns)]
    roles = [one for one in columns if one.path_in_schema.startswith(prefix) and one.path_in_schema.endswith(".role")]
    return sum(one.statistics.null_count or 0 for one in roles if one.statistics)


def made_by_assets(config: DictConfig, path: Path) -> str | None:
    """How to make what the config's own assets lack; None: it is not one of them."""
    if "assets" not in config or Path(config.assets).absolute() not in path.absolute().parents:
        return None
    return f"make it with python -m {config.assets_command} --output {config.assets}"


def _model_maker(config: DictConfig, key: str, path: Path) -> str:
    if made := made_by_assets(config, path):
        return made
    parts = path.parts
    if path.exists() or path.is_absolute() or len(parts) != 2 or parts[0] in (".", "..", "~"):
        return f"point {key} at the folder of a model, bash scripts/prepare_model.sh fetches one"
    # models/Qwen3-32B is a config's own, OWNER/NAME is a hub's.
    name = parts[1] if parts[0] == "models" else str(path)
    return f"bash scripts/prepare_model.sh {name} fetches it to models/{parts[1]}, set {key} to that folder"


def model_problems(config: DictConfig) -> Iterator[Problem]:
    folders = (f"actor_rollout_ref.model.{name}_path" for name in ("hf_config", "lora_adapter", "tokenizer"))
    for key in (*folders, "trainer.resume_from_path"):
        if (name := OmegaConf.select(config, key)) and not Path(str(name)).expanduser().is_dir():
            yield Problem("model.missing", f"{key}={name}: no such folder", f"correct {key}")
    has_critic = config.critic.enable or (config.critic.enable is None and config.algorithm.adv_estimator == "gae")
    others = ("critic.model.path", has_critic), ("reward.reward_model.model_path", config.reward.reward_model.enable)
    for key in (key for key, is_loaded in others if is_loaded):
        name = OmegaConf.select(config, key)
        if not (Path(str(name)).expanduser() / "config.json").is_file():
            yield Problem("model.missing", f"{key}={name}: no config.json", f"point {key} at the folder of a model")
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    key = "actor_rollout_ref.model.path"
    if not (model / "config.json").is_file():
        yield Problem("model.missing", f"{key}={model}: no config.json", _model_maker(config, key, model))
        return
    if not (model / "tokenizer_config.json").is_file():
        yield Problem("model.missing", f"{key}={model}: no tokenizer_config.json")
    elif not any((model / name).is_file() for name in VOCABULARIES):
        yield Problem("model.missing", f"{key}={model}: neither {' nor '.join(VOCABULARIES)}")
    yield from weights.find_problems(model)


def history_problems(config: DictConfig) -> Iterator[Problem]:
    """Whether responses can be kept where the config says, and those that are there are this model's."""
    if (folder := config.speculation.history_path) is None:
        return
    from sam.history import database  # only where there is a history

    model = Path(config.actor_rollout_ref.model.path).expanduser()
    written_in = database.fingerprint(str(model)) if model.is_dir() else None
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
        if template := config.actor_rollout_ref.model.custom_chat_template:
            tokenizer.chat_template = template
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    except Exception as error:
        yield Problem("model.tokenizer", f"actor_rollout_ref.model.path={model}: {first_line(error)}")
