"""What a run script says before anything is installed; test_scripts.py starts them without any package."""

import re
import textwrap
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from sam_recipe.arguments import CONFIGS, NAMES_FILE, misspelt
from sam_recipe.launch.config import compose_config, verl_configs


def names_in(value) -> set[str]:
    if isinstance(value, list):
        return {name for one in value for name in names_in(one)}
    if not isinstance(value, dict):
        return set()
    # Where a group of choices goes: `- actor@actor_rollout_ref.actor: dp_actor`.
    return {name for key, below in value.items() for name in (*re.split("[@./ ]", str(key)), *names_in(below))}


def all_names() -> set[str]:
    """Of the keys of verl's config and of this project's."""
    links = (CONFIGS / name for name in ("speculation", "routing"))
    folders = (Path(verl_configs().removeprefix("file://")), CONFIGS, *links)
    files = [path for folder in folders for path in folder.rglob("*.yaml")]
    found = {name for path in files for name in names_in(yaml.safe_load(path.read_text()))}
    return {name for name in found if name.isidentifier()}


def test_the_names_of_keys_are_verls_and_this_projects():
    known = set(NAMES_FILE.read_text().split())
    assert known == all_names(), "write it: python -m tests.recipe.test_arguments"
    composed = names_in(OmegaConf.to_container(compose_config("dapo_qwen3_235b", ["scale=smoke"])))
    vllms = {"speculative_config", "additional_config"}  # below engine_kwargs, where any name is let through
    assert {name for name in composed if name.isidentifier()} - vllms <= known


def test_a_typing_mistake_is_named():
    for override, said in {
        "speculation=sma": "speculation=sma is unknown: expected one of draft_model, eagle3, hybrid, ngram, off, ",
        "routing=contxt": "routing=contxt is unknown: expected one of context, verl",
        "speculaton=off": "speculaton does not exist: did you mean speculation?",
        "trainer.total_trainin_steps=5": "does not exist: did you mean trainer.total_training_steps?",
        "actor_rollout_ref.rolout.n=4": "does not exist: did you mean actor_rollout_ref.rollout.n?",
        "speculation.policy=treshold": "speculation.policy=treshold is unknown: expected one of always, goodput, ",
        "+trainer.resum_mode=auto": "did you mean trainer.resume_mode?",
        "off": "off: expected KEY=VALUE, such as speculation=off",
    }.items():
        assert said in misspelt(["speculation=off", override]), override


def test_what_is_right_is_let_through():
    right = [
        *("speculation=off", "speculation.policy='goodput'", "speculation.async_scheduling=off"),
        *("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", "trainer.logger=[console]", "run_dir=/a=b/c"),
        *("~trainer.logger", "speculation.num_speculative_tokens=${seed}"),
    ]
    assert misspelt(right) is None


if __name__ == "__main__":
    Path(NAMES_FILE).write_text(textwrap.fill(" ".join(sorted(all_names())), 120) + "\n")
