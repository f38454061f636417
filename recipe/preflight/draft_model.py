"""Whether speculation's trained drafter is there and can draft for the model, on these ranks and this device."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.preflight import weights
from recipe.preflight.problem import Problem
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.trained_drafter import settings_of, wrong_kind

LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def trained_method(config: DictConfig) -> str | None:
    """What vLLM calls speculation's trained drafter; None without one."""
    if config.speculation.method not in WITH_DRAFT_MODEL:
        return None
    return SpeculationConfig.from_dict(OmegaConf.to_container(config.speculation)).trained_method()


def is_missing(config: DictConfig) -> bool:
    """Whether a trained drafter is asked for that is not there."""
    return trained_method(config) is not None and not (Path(config.speculation.draft_model) / "config.json").is_file()


def find_problems(config: DictConfig) -> Iterator[Problem]:
    if (method := trained_method(config)) is None:
        return
    folder, model = Path(config.speculation.draft_model), Path(config.actor_rollout_ref.model.path).expanduser()
    yield from _ranks(config.actor_rollout_ref.rollout, settings_of(model))
    key = f"speculation.draft_model={folder}"
    if is_missing(config):
        yield Problem("drafter.missing", f"{key}: no config.json", _maker(config))
    elif found := wrong_kind(folder, method):
        other = "choose the other of draft_model and eagle3, or hybrid"
        yield Problem("drafter.unlike", f"{key} holds {found}, speculation={method}", other)
    else:
        yield from weights.find_problems(folder)
        if (model / "config.json").is_file():  # one that is missing has a line of its own
            for said in _unlike(settings_of(folder), settings_of(model), config, method):
                yield Problem("drafter.unlike", f"{key}: {said}")


def _ranks(rollout: DictConfig, target: dict) -> Iterator[Problem]:
    """Those that cannot run a draft model's passes together. Data-parallel engines of a dense model are independent."""
    has_experts = any(target.get(name) for name in EXPERTS)
    for key in ("pipeline_model_parallel_size", "data_parallel_size"):
        if (size := rollout.get(key) or 1) > 1 and (has_experts or key != "data_parallel_size"):
            why = " of a model with experts" * (key == "data_parallel_size")
            yield Problem("drafter.ranks", f"actor_rollout_ref.rollout.{key}={size}{why}")


def _maker(config: DictConfig) -> str | None:
    is_head = config.speculation.method == "eagle3"
    if "assets" in config:
        return f"make it with sam distil --assets {config.assets}" + " --kind eagle3" * is_head
    return "point the key at a head that was trained for this model" if is_head else None


def _unlike(draft: dict, target: dict, config: DictConfig, method: str) -> Iterator[str]:
    """What vLLM does not say before it loads the weights, or not at all."""
    alike = {"vocab_size": "vocab_size"}  # drafts are token ids of the target
    if config.trainer.device == "cpu":  # vLLM's attention there plans both models' passes with the target's heads
        alike |= {name: name for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    if method == "eagle3":  # it reads the target's hidden states
        alike["target_hidden_size" if "target_hidden_size" in draft else "hidden_size"] = "hidden_size"
    for name, of_target in alike.items():
        if (found := draft.get(name)) != (wanted := target.get(of_target)):
            yield f"{name}={found}, the model's is {wanted}"
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    for name in ("num_attention_heads", "intermediate_size", "num_key_value_heads"):
        size = draft.get(name) or ranks
        if max(size, ranks) % min(size, ranks) or (size < ranks and name != "num_key_value_heads"):
            yield f"{name}={size} does not divide among tensor_model_parallel_size={ranks}"
    needed = config.speculation.num_speculative_tokens + config.data.max_prompt_length
    if needed > (positions := draft.get("max_position_embeddings") or needed):
        yield f"max_position_embeddings={positions}, num_speculative_tokens + data.max_prompt_length = {needed}"
    if method == "eagle3" and type(last := target.get("num_hidden_layers")) is int:
        named = draft.get(LAYERS_READ) or (draft.get("eagle_config") or {}).get(LAYERS_READ)
        layers = named or (2, last // 2, last - 3)  # vLLM's own choice
        if not all(type(layer) is int and 0 <= layer <= last for layer in layers) or len({*layers}) != len(layers):
            yield f"{LAYERS_READ}={list(layers)}, expected different ones, the model has {last} layers"
