"""Which router a run has: what `auto` stands for, and what the log says of it."""

import pytest

from recipe.launch import routing
from recipe.launch.config import CONFIGS, ConfigError, compose_config

ONE, TWO = (f"trainer.n_gpus_per_node={count}" for count in (1, 2))
CUDA = "dapo_qwen3_8b_cuda"  # 128 prompts of 16 samples, dynamic sampling keeps 64; up to 8192 tokens


def slots(count: int) -> str:
    return f"actor_rollout_ref.rollout.max_num_seqs={count}"


@pytest.mark.parametrize(
    ("name", "overrides", "policy", "chunk"),
    [
        (CUDA, [], "context", 1024),
        (CUDA, [ONE, slots(2047)], "context", 1024),
        (CUDA, [ONE, slots(2048)], "verl", None),
        # Without dynamic sampling a round is a batch.
        (CUDA, [ONE, slots(1024), "algorithm.filter_groups.enable=false"], "verl", None),
        (CUDA, [TWO, slots(2048)], "context", 1024),
        (CUDA, [TWO, slots(2048), "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "verl", None),
        (CUDA, ["data.max_response_length=1024"], "context", 256),
        (CUDA, ["routing.chunk_tokens=16"], "context", 16),
        (CUDA, ["speculation.verification=rejection"], "context", None),
        (CUDA, ["routing=verl"], "verl", None),
        (CUDA, ["routing=context"], "context", None),
        (CUDA, ["actor_rollout_ref.rollout.n=0"], None, None),
        ("dapo_qwen3_32b", [], "context", 34816 // 8),
        ("dapo_qwen3_32b_128die", [], "context", 34816 // 8),
        ("dapo_qwen3_235b", [], "verl", None),  # one replica, whose slots hold a round
        # On a CPU the router costs more than it brings.
        ("dapo_tiny_cpu", [], "verl", None),
        ("dapo_tiny_cpu", [TWO, slots(12)], "verl", None),
        ("dapo_tiny_cpu", [TWO, "routing=context"], "context", None),
        ("dapo_smollm2_cpu", [], "verl", None),
    ],
)
def test_auto_is_the_recipes_router_where_it_has_something_to_decide(name, overrides, policy, chunk):
    if policy is None:
        with pytest.raises(ConfigError, match="expected an integer of at least 1"):
            compose_config(name, overrides)
        return
    config = compose_config(name, [*overrides, "run_dir=/a/run"])
    assert (config.routing.policy, config.routing.chunk_tokens) == (policy, chunk)
    path = config.actor_rollout_ref.rollout.router_config_path
    assert path == ("/a/run/router.yaml" if policy == "context" else None)


def test_a_router_of_ones_own_is_not_replaced(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("router_class: recipe.rollout.router.ContextRouterActor\n")
    config = compose_config(CUDA, [f"actor_rollout_ref.rollout.router_config_path={own}"])
    assert config.routing.policy == "verl" and config.actor_rollout_ref.rollout.router_config_path == str(own)
    assert routing.describe(config) == f"the router that {own} names"


def test_the_line_of_the_log_says_which_why_and_the_way_out():
    assert routing.describe(compose_config("dapo_tiny_cpu", [TWO])) == (
        "verl's balancer (a CPU, 2 replicas, 96 requests in a round, 256 slots; routing=context: the recipe's router)"
    )
    context = routing.describe(compose_config(CUDA, []))
    assert context.startswith("context, chunks of 1024 tokens (8 replicas, 2048 requests in a round, 1024 slots; ")
    assert context.endswith("routing=verl: verl's balancer)")
    none = [ONE, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    assert routing.describe(compose_config(CUDA, none)).startswith("verl's balancer (no replica fits the devices; ")
    one = routing.describe(compose_config(CUDA, [ONE, "routing=context"]))
    assert one.startswith("context, whole responses (1 replica, 2048 requests")


def test_every_policy_is_a_file():
    assert {path.stem for path in (CONFIGS / "routing").glob("*.yaml")} == {*routing.POLICIES, "knobs"}
