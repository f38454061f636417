"""Whether a run shares text between replicas: what `auto` stands for, and the memory that it takes."""

import pytest

from sam_recipe.launch import sharing
from sam_recipe.launch.config import compose_config

TWO = "trainer.n_gpus_per_node=2"


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("dapo_tiny_cpu", [], "none"),
        ("dapo_tiny_cpu", [TWO], "replicas"),
        ("dapo_tiny_cpu", [TWO, "speculation=hybrid"], "replicas"),
        ("dapo_tiny_cpu", [TWO, "speculation.scope=history"], "replicas"),
        ("dapo_tiny_cpu", [TWO, "speculation.scope=request"], "none"),
        ("dapo_tiny_cpu", [TWO, "speculation.sharing=none"], "none"),
        ("dapo_tiny_cpu", [TWO, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "none"),
        ("dapo_tiny_cpu", ["speculation.sharing=replicas"], "replicas"),
        *[("dapo_tiny_cpu", [TWO, f"speculation={method}"], "none") for method in ("off", "ngram", "suffix")],
        ("dapo_tiny_cpu", [TWO, "speculation=draft_model"], "none"),
        ("dapo_tiny_cpu", [TWO, "speculation=off", "speculation.sharing=replicas"], "none"),
        ("dapo_qwen3_32b", [], "replicas"),
        ("dapo_qwen3_32b_128die", [], "replicas"),
    ],
)
def test_auto_is_on_where_several_replicas_draft_from_text(name, overrides, expected):
    config = compose_config(name, overrides)
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.speculation
    assert config.speculation.sharing == engine.sharing == expected
    assert (expected == "none") == sharing.describe(config).startswith("none")


def test_the_log_has_room_for_the_longest_responses_of_a_round():
    config = compose_config("dapo_qwen3_32b_128die", [])
    responses = config.data.gen_batch_size * config.actor_rollout_ref.rollout.n
    text = responses * config.data.max_response_length
    assert 4 * text < sharing.needed_mib(config) << 20 < 24 * text


def test_the_line_of_the_log_names_replicas_ranks_memory_and_the_way_out():
    said = sharing.describe(compose_config("dapo_qwen3_32b", []))
    assert said == "4 replicas see each other's text, in 1148 MiB at most (speculation.sharing=none: without)"
    alone = sharing.describe(compose_config("dapo_tiny_cpu", []))
    assert alone == "none, drafters see the text of their own replica (1 replica)"
    alone = sharing.describe(compose_config("dapo_tiny_cpu", ["speculation.sharing=replicas"]))
    assert alone.startswith("1 replica has no other to share with, in ")
    ranks = sharing.describe(compose_config("dapo_qwen3_235b", []))
    own = "none, drafters see the text of their own data-parallel rank"
    assert ranks == f"{own} (1 replica of 32 data-parallel ranks)"
    ranks = sharing.describe(compose_config("dapo_qwen3_235b", ["speculation.sharing=replicas"]))
    assert ranks.startswith("1 replica of 32 data-parallel ranks see each other's text, ")
