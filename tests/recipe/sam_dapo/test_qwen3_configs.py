"""Every config, drafter and scale, through Hydra, verl's validation and vLLM's argument parser."""

from importlib.resources import files

import pytest
from verl.utils.config import validate_config

from recipe.sam_dapo.launch.config import CONFIGS, compose_config
from recipe.sam_dapo.preflight.vllm_command import engine_arguments
from sam.config import METHODS, WITH_DRAFT_MODEL
from tests.recipe.sam_dapo.preflight.preflight_node import composed

# What vLLM is told to draft with, by the choice of speculation.
DRAFTERS = {"sam": "sam.SamProposer", "off": None, "ngram": "ngram", "suffix": "suffix"}
DRAFTERS |= dict.fromkeys(WITH_DRAFT_MODEL, "/models/draft")
# Every drafter on GPUs, on NPUs those that preflight does not refuse there; every config at every scale; and FSDP2.
CHOICES = {
    *(("dapo_qwen3_8b_cuda", method, "full", "") for method in METHODS),
    *(("dapo_qwen3_32b", method, "full", "") for method in METHODS if method not in WITH_DRAFT_MODEL),
    *((f"dapo_qwen3_{name}", "sam", "full", "") for name in ("32b_128die", "235b")),
    *((f"dapo_qwen3_{name}", "sam", "smoke", "") for name in ("8b_cuda", "32b", "32b_128die", "235b")),
    *(("dapo_qwen3_32b", "sam", "full", device) for device in ("npu", "cuda")),
}


@pytest.mark.parametrize(("name", "method", "scale", "device"), sorted(CHOICES))
def test_verl_and_vllm_accept_every_choice(name, method, scale, device):
    """With a device, the dense model trains with FSDP2 there."""
    needed = ["speculation.draft_model=/models/draft"] if method in WITH_DRAFT_MODEL else []
    needed += ["training=fsdp2", f"device={device}"] if device else []
    config = compose_config(name, [f"speculation={method}", f"scale={scale}", *needed])
    validate_config(config, use_reference_policy=False, use_critic=False)
    parsed, rollout = engine_arguments(config), config.actor_rollout_ref.rollout
    assert parsed.max_num_seqs == rollout.max_num_seqs
    assert parsed.tensor_parallel_size == rollout.tensor_model_parallel_size
    drafter = parsed.speculative_config or {}
    expected = "ngram_gpu" if (method, scale) == ("sam", "full") else DRAFTERS[method]
    assert (drafter.get("model") or drafter.get("method")) == expected
    assert drafter.get("num_speculative_tokens") == (config.speculation.num_speculative_tokens if drafter else None)
    assert parsed.additional_config["speculation"]["verification"] == "exact"
    assert config.trainer.experiment_name == f"{name}_{method}"
    on = (device or ("cuda" if "cuda" in name else "npu")) if scale == "full" else "cpu"
    assert config.trainer.device == on
    assert config.actor_rollout_ref.actor.strategy == ("megatron" if on == "npu" and not device else "fsdp2")
    assert on != "npu" or parsed.compilation_config.cudagraph_mode.name == "FULL"


def test_torchs_attention_keeps_packed_sequences_apart():
    """What configs/device/cuda.yaml relies on: verl packs responses into one row and tells them apart by position."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = composed("dapo_qwen3_8b_cuda").actor_rollout_ref.model
    config._attn_implementation = model.override_config["attn_implementation"]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).train()  # no dropout in it
    first, second = torch.randint(100, (1, 7)), torch.randint(100, (1, 5))
    alone = torch.cat([model(input_ids=one, use_cache=False).logits for one in (first, second)], 1)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert torch.allclose(alone, packed, atol=1e-6)


def test_every_choice_is_known_and_every_config_has_a_script():
    assert (
        set(DRAFTERS)
        == set(METHODS)
        == {path.stem for path in (files("sam.configs") / "speculation").glob("*")} - {"knobs"}
    )
    for path in CONFIGS.glob("dapo_*.yaml"):
        assert path.stem in (CONFIGS.resolve().parent / "scripts" / f"run_{path.stem}.sh").read_text()
