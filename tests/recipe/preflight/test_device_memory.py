"""Estimates of memory against counts that are known, and what preflight makes of them."""

import json

import pytest

from recipe.preflight import machine
from tests.recipe.preflight.preflight_node import SIZES as QWEN3_32B
from tests.recipe.preflight.preflight_node import config_of

# As in the published config.json files.
QWEN3_8B = QWEN3_32B | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
}  # fmt: skip
QWEN3_235B = {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_32B, 32.8), (QWEN3_235B, 235.1)])
def test_parameters_are_the_published_ones(model_folder, config, billions):
    found = machine.model_of(config_of("dapo_qwen3_32b", model_folder(config)))
    assert (found.embeddings + found.attention + found.feed_forward) / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.fixture
def model_folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return f"actor_rollout_ref.model.path={tmp_path}"

    return write


@pytest.mark.parametrize(
    ("name", "model", "overrides"),
    [
        ("dapo_qwen3_32b", QWEN3_32B, []),
        ("dapo_qwen3_32b", QWEN3_32B, ["training=fsdp2"]),
        ("dapo_qwen3_32b_128die", QWEN3_32B, []),
        ("dapo_qwen3_235b", QWEN3_235B, []),
        ("dapo_qwen3_8b_cuda", QWEN3_8B, []),
    ],
)
def test_the_published_set_ups_fit(model_folder, name, model, overrides):
    config = config_of(name, model_folder(model), *overrides)
    assert list(machine.memory_of_a_device(config)) == []
    found = machine.device_memory(config)
    assert found.weights < 0.9 * found.device and sum(found.training.values()) < found.device
    assert found.longest_responses >= 1
    assert "longest responses" in machine.describe_device_memory(config)


@pytest.mark.parametrize(
    ("training", "checkpoint", "offloaded"),
    [
        # bf16 weights, float32 master weights and moments; half of the optimizer and 16 dies' sixteenths of the weights
        ([], 14, 12 / 2 + 2),
        (["training=fsdp2"], 12, (8 + 4) / 2),  # float32 weights and moments
    ],
)
def test_bytes_of_a_parameter(model_folder, training, checkpoint, offloaded):
    """In a checkpoint and in a node's memory."""
    config = config_of("dapo_qwen3_32b", model_folder(QWEN3_32B), *training)
    found = machine.device_memory(config)
    assert found.checkpoint * 2**30 == pytest.approx(checkpoint * 32.8e9, rel=0.01)
    assert found.offloaded * 2**30 == pytest.approx(offloaded * 32.8e9, rel=0.01)


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", "memory.kv_cache"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.13", "memory.kv_cache"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "memory.training"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400000", "memory.training"),
    ],
)
def test_what_does_not_fit_is_found(model_folder, override, code):
    config = config_of("dapo_qwen3_32b", model_folder(QWEN3_32B), override)
    (problem,) = machine.memory_of_a_device(config)
    assert code in problem


def test_no_estimate_without_the_model_or_on_a_cpu():
    config = config_of("dapo_qwen3_32b", "actor_rollout_ref.model.path=/none")
    assert machine.device_memory(config) is None
    assert machine.device_memory(config_of("dapo_tiny_cpu")) is None
