"""What machines must have: the numbers behind the lines. tests/recipe/sam_dapo/test_ray.py asks a node itself."""

import json

import pytest
import ray
from omegaconf import OmegaConf

from recipe.sam_dapo import preflight
from recipe.sam_dapo.preflight import device_memory, machine
from tests.recipe.sam_dapo.preflight.preflight_node import SIZES as QWEN3_32B
from tests.recipe.sam_dapo.preflight.preflight_node import composed, config_of

# As in the published config.json files.
QWEN3_8B = QWEN3_32B | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
}  # fmt: skip
QWEN3_235B = QWEN3_32B | {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_key_value_heads": 4, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_experts": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("dapo_qwen3_32b", QWEN3_32B),
        ("dapo_qwen3_32b training=fsdp2", QWEN3_32B),
        ("dapo_qwen3_32b_128die", QWEN3_32B),
        ("dapo_qwen3_235b", QWEN3_235B),
        ("dapo_qwen3_8b_cuda", QWEN3_8B),
    ],
)
def test_the_published_set_ups_fit(tmp_path, name, model):
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = config_of(*name.split(), f"actor_rollout_ref.model.path={tmp_path}")
    memory = device_memory.device_memory(config)
    assert list(device_memory.problems(config)) == [] and memory.generation.longest_responses >= 1
    assert memory.generation.weights < 0.9 * memory.device and sum(memory.training) < memory.device
    # Of bf16 weights (Megatron), float32 master weights and two moments.
    bytes_each = 14 if "megatron" in config.actor_rollout_ref.actor else 12
    parameters = device_memory.Model.from_config(model).parameters
    assert memory.checkpoint * 2**30 == pytest.approx(bytes_each * parameters)


def test_a_line_has_the_nodes_that_it_is_about(monkeypatch, tmp_path):
    nodes = [{"Alive": True}, {"Alive": False}]
    for name, value in {"init": None, "nodes": nodes, "shutdown": None}.items():
        monkeypatch.setattr(ray, name, lambda value=value, **_: value)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(machine, "ask_nodes", lambda *_: {"10.0.0.1": ["a", "b"], "10.0.0.2": ["a"]})
    config = OmegaConf.merge(composed("dapo_qwen3_32b"), {"run_dir": str(tmp_path / "run")})
    missing, *found = machine.ray_cluster(config, preflight.node_problems)
    assert missing.startswith("1 of 2 nodes are there: bash scripts/start_ray_cluster.sh head here")
    assert found == ["on every node: a", "on 10.0.0.1: b"] and not list(tmp_path.iterdir())
