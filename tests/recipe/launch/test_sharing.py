"""Whether a run shares text between replicas: what `auto` stands for, and the memory that null stands for."""

import pytest

from recipe.launch import sharing
from recipe.launch.config import compose_config

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


def test_the_shards_have_room_for_the_longest_responses_of_a_round():
    config = compose_config("dapo_qwen3_32b_128die", [])
    responses = config.data.gen_batch_size * config.actor_rollout_ref.rollout.n
    text = responses * config.data.max_response_length
    assert 4 * text < config.speculation.sharing_memory_mib << 20 < 24 * text
    given = compose_config("dapo_qwen3_32b_128die", ["speculation.sharing_memory_mib=77"])
    assert given.speculation.sharing_memory_mib == 77
    assert compose_config("dapo_tiny_cpu", []).speculation.sharing_memory_mib is None


def test_the_line_of_the_log_names_replicas_shards_memory_and_the_way_out():
    said = sharing.describe(compose_config("dapo_qwen3_32b", ["speculation.sharing_shards=2"]))
    assert said.startswith("4 replicas see each other's text through 2 shards, 1148 MiB in all at most")
    assert "speculation.sharing=none" in said and "\n" not in said
    assert "1 in all" in sharing.describe(compose_config("dapo_tiny_cpu", []))
    alone = sharing.describe(compose_config("dapo_tiny_cpu", ["speculation.sharing=replicas"]))
    assert alone.startswith("1 replica has no other to share with, its text is in 1 shard, ")


def test_the_line_tells_of_data_parallel_ranks_which_have_a_drafter_each():
    """The shards are told to every rank's engine: with them ranks see each other's text, without them none does."""
    said = sharing.describe(compose_config("dapo_qwen3_235b", []))
    own = "their own data-parallel rank, and the ranks of a replica do not share"
    assert said == f"none, drafters see the text of {own} (1 replica of 32 data-parallel ranks)"
    said = sharing.describe(compose_config("dapo_qwen3_235b", ["speculation.sharing=replicas"]))
    assert said.startswith("1 replica of 32 data-parallel ranks see each other's text through 1 shard, ")
