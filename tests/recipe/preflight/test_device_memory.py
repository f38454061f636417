"""Estimates of memory against counts that are known, and what preflight makes of them."""

import json

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import device_memory

# As in the published config.json files.
QWEN3_32B = {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 25600, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_32B, 32.8), (QWEN3_235B, 235.1)])
def test_parameters_are_the_published_ones(config, billions):
    assert device_memory.Model.from_config(config).parameters / 1e9 == pytest.approx(billions, abs=0.1)


def test_parameters_equal_transformers_count():
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        counted = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())
    estimated = device_memory.Model.from_config(config.to_dict()).parameters
    assert abs(counted - estimated) <= 64 + 3 * 2 * 32  # the last norm and those of queries and keys


def test_a_split_divides():
    model = device_memory.Model.from_config(QWEN3_32B)
    whole = device_memory.generation(model, 1, 1, 1000, 0.9, 36864)
    split = device_memory.generation(model, 8, 1, 1000, 0.9, 36864)
    assert whole.weights == pytest.approx(8 * split.weights)
    one = device_memory.megatron(model, 32, {"tensor": 8, "pipeline": 2, "context": 2, "expert": 1}, 18432)
    more = device_memory.megatron(model, 128, {"tensor": 8, "pipeline": 2, "context": 2, "expert": 1}, 18432)
    assert one.optimizer == pytest.approx(4 * more.optimizer)
    assert (one.weights, one.activations) == (more.weights, more.activations)


@pytest.fixture
def model_folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return f"actor_rollout_ref.model.path={tmp_path}"

    return write


@pytest.mark.parametrize(
    ("name", "model"),
    [("dapo_qwen3_32b", QWEN3_32B), ("dapo_qwen3_32b_128die", QWEN3_32B), ("dapo_qwen3_235b", QWEN3_235B)],
)
def test_the_published_set_ups_fit(model_folder, name, model):
    config = compose_config(name, [model_folder(model)])
    assert list(device_memory.find_problems(config)) == []
    generating, training, device = device_memory.estimates(config)
    assert generating.weights < 0.87 * device and training.total < device
    assert generating.longest_responses >= 1
    assert "longest responses" in device_memory.describe(config)


@pytest.mark.parametrize("name", ["dapo_qwen3_32b", "dapo_qwen3_32b_128die"])
def test_the_dense_model_fits_with_fsdp2_too(model_folder, name):
    config = compose_config(name, [model_folder(QWEN3_32B), "training=fsdp2"])
    assert list(device_memory.find_problems(config)) == []


def test_a_checkpoint_is_weights_and_optimizer(model_folder):
    override = model_folder(QWEN3_32B)
    megatron = device_memory.checkpoint_gib(compose_config("dapo_qwen3_32b", [override]))
    fsdp2 = device_memory.checkpoint_gib(compose_config("dapo_qwen3_32b", [override, "training=fsdp2"]))
    assert megatron * 2**30 == pytest.approx(14 * 32.8e9, rel=0.01)  # bf16 weights, float32 master weights and moments
    assert fsdp2 * 2**30 == pytest.approx(12 * 32.8e9, rel=0.01)  # float32 weights and moments


def test_what_is_offloaded_lies_in_a_nodes_memory(model_folder):
    def gib(*overrides):
        return device_memory.offloaded_gib(compose_config("dapo_qwen3_32b", [model_folder(QWEN3_32B), *overrides]))

    # Half of the optimizer, and sixteen dies' sixteenths of the weights.
    assert gib() * 2**30 == pytest.approx(12 * 32.8e9 / 2 + 2 * 32.8e9, rel=0.01)
    assert gib("training=fsdp2") * 2**30 == pytest.approx((8 + 4) * 32.8e9 / 2, rel=0.01)
    off = [f"actor_rollout_ref.actor.megatron.{name}_offload=false" for name in ("param", "optimizer")]
    assert gib(*off) == 0


def test_the_embedding_is_the_largest_tensor(model_folder):
    override = model_folder(QWEN3_32B)
    assert device_memory.largest_tensor_mib(compose_config("dapo_qwen3_32b", [override])) == pytest.approx(1484, abs=1)
    fsdp2 = compose_config("dapo_qwen3_32b", [override, "training=fsdp2"])
    assert device_memory.largest_tensor_mib(fsdp2) == pytest.approx(2968, abs=1)


def test_eight_gpus_hold_qwen3_8b(model_folder):
    sizes = {**QWEN3_32B, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    config = compose_config("dapo_qwen3_8b_cuda", [model_folder({**sizes, "intermediate_size": 12288})])
    assert list(device_memory.find_problems(config)) == []
    assert device_memory.estimates(config)[0].longest_responses > 10


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
    config = compose_config("dapo_qwen3_32b", [model_folder(QWEN3_32B), override])
    (problem,) = device_memory.find_problems(config)
    assert problem.code == code


def test_no_estimate_without_the_model_or_on_a_cpu():
    config = compose_config("dapo_qwen3_32b", [])
    assert device_memory.estimates(config) is None
    assert device_memory.checkpoint_gib(config) == device_memory.offloaded_gib(config) == 0
    assert device_memory.estimates(compose_config("dapo_tiny_cpu", [])) is None
