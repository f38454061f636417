"""Which router a run has, and what the log says of it."""

from sam_recipe.launch import routing
from sam_recipe.launch.config import CONFIGS, compose_config


def test_verls_balancer_is_the_default_on_every_device():
    assert {path.stem for path in (CONFIGS / "routing").glob("*.yaml")} == {*routing.POLICIES, "knobs"}
    for path in sorted(CONFIGS.glob("dapo_*.yaml")):
        config = compose_config(path.stem, [])
        assert config.routing.policy == "verl" and config.routing.chunk_tokens is None, path.stem
        assert config.actor_rollout_ref.rollout.router_config_path is None
        assert routing.describe(config) == "verl's balancer (routing=context: the recipe's router)"


def test_the_recipes_router_has_a_file_of_its_own_and_a_users_is_not_replaced(tmp_path):
    config = compose_config("dapo_tiny_cpu", ["routing=context", "routing.chunk_tokens=64", "run_dir=/a/run"])
    assert config.actor_rollout_ref.rollout.router_config_path == "/a/run/router.yaml"
    assert routing.describe(config) == "context, chunks of 64 tokens (routing=verl: verl's balancer)"
    own = tmp_path / "own.yaml"
    own.write_text("router_class: sam_recipe.rollout.router.ContextRouterActor\n")
    config = compose_config("dapo_tiny_cpu", [f"actor_rollout_ref.rollout.router_config_path={own}"])
    assert config.actor_rollout_ref.rollout.router_config_path == str(own)
    assert routing.describe(config) == f"the router that {own} names"
