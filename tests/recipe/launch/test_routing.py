"""Which router a run has: what `auto` stands for, and what the log says of it."""

import pytest

from recipe.launch import routing
from recipe.launch.config import CONFIGS, compose_config

TWO = "trainer.n_gpus_per_node=2"
FEW_SLOTS = "actor_rollout_ref.rollout.max_num_seqs=95"


@pytest.mark.parametrize(
    ("name", "overrides", "policy", "chunk"),
    [
        ("dapo_tiny_cpu", [], "verl", None),
        ("dapo_tiny_cpu", ["actor_rollout_ref.rollout.max_num_seqs=96"], "verl", None),
        ("dapo_tiny_cpu", [FEW_SLOTS], "context", 64),
        # Without dynamic sampling a round is a batch, of 8 prompts here.
        ("dapo_tiny_cpu", [FEW_SLOTS, "algorithm.filter_groups.enable=false"], "verl", None),
        ("dapo_tiny_cpu", [TWO], "context", 64),
        ("dapo_tiny_cpu", [TWO, "data.max_response_length=96"], "context", 64),
        ("dapo_tiny_cpu", [TWO, "routing.chunk_tokens=16"], "context", 16),
        ("dapo_tiny_cpu", [TWO, "routing=verl"], "verl", None),
        ("dapo_tiny_cpu", [TWO, "routing=context"], "context", None),
        ("dapo_tiny_cpu", ["routing=context"], "context", None),
        ("dapo_tiny_cpu", [TWO, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "verl", None),
        ("dapo_smollm2_cpu", [], "verl", None),
        ("dapo_qwen3_32b", [], "context", 34816 // 8),
        ("dapo_qwen3_235b", [], "context", 34816 // 8),
    ],
)
def test_auto_is_the_recipes_router_where_it_has_something_to_decide(name, overrides, policy, chunk):
    config = compose_config(name, [*overrides, "run_dir=/a/run"])
    assert (config.routing.policy, config.routing.chunk_tokens) == (policy, chunk)
    path = config.actor_rollout_ref.rollout.router_config_path
    assert path == ("/a/run/router.yaml" if policy == "context" else None)


def test_a_router_of_ones_own_is_not_replaced(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("router_class: recipe.rollout.router.ContextRouterActor\n")
    config = compose_config("dapo_tiny_cpu", [TWO, f"actor_rollout_ref.rollout.router_config_path={own}"])
    assert config.routing.policy == "verl" and config.actor_rollout_ref.rollout.router_config_path == str(own)
    assert routing.describe(config) == f"the router that {own} names"


def test_the_line_of_the_log_says_which_why_and_the_way_out():
    assert routing.describe(compose_config("dapo_tiny_cpu", [])) == (
        "verl's balancer (1 replica, 96 requests in a round, 128 slots; routing=context: the recipe's router)"
    )
    assert routing.describe(compose_config("dapo_tiny_cpu", [TWO])) == (
        "context, chunks of 64 tokens (2 replicas, 96 requests in a round, 256 slots; routing=verl: verl's balancer)"
    )
    whole = compose_config("dapo_tiny_cpu", [TWO, "routing=context"])
    assert routing.describe(whole).startswith("context, whole responses (2 replicas")


def test_every_policy_is_a_file():
    assert {path.stem for path in (CONFIGS / "routing").glob("*.yaml")} == {*routing.POLICIES, "knobs"}
