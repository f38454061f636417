"""Every config, with every drafter and at every scale, through Hydra, verl's validation and vLLM's argument parser."""

import json
import re
from pathlib import Path

import pytest

from recipe.configuration import CONFIGS, compose_config
from recipe.speculation import METHODS

NAMES = ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b")
SCALES = ("full", "smoke")
# Dies, train batch, prompts per round, running requests, rollout tensor parallel, draft tokens, threshold.
PUBLISHED = {
    "dapo_qwen3_32b": (32, 32, 96, 128, 8, 3, 8),
    "dapo_qwen3_32b_128die": (128, 512, 1536, 256, 8, 4, 4),
    "dapo_qwen3_235b": (128, 128, 128, 64, 4, 3, 8),
}


@pytest.fixture(scope="module")
def verl_validation():
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    def validate(config):
        validate_config(config, use_reference_policy=False, use_critic=False)
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)

    return validate


@pytest.mark.parametrize("name", NAMES)
def test_the_published_sizes(name):
    config = compose_config(name, [])
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    found = (
        trainer.nnodes * trainer.n_gpus_per_node,
        config.data.train_batch_size,
        config.data.gen_batch_size,
        rollout.max_num_seqs,
        rollout.tensor_model_parallel_size,
        config.speculation.num_speculative_tokens,
        config.speculation.batch_size_threshold,
    )
    assert found == PUBLISHED[name]
    assert config.data.max_response_length == 34816
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.n) == (1.0, 1.0, -1, 16)
    assert config.actor_rollout_ref.actor.strategy == "megatron" and trainer.device == "npu"
    assert rollout.expert_parallel_size == (128 if "235b" in name else 1)


@pytest.mark.parametrize("name", NAMES)
def test_parallel_sizes_fill_the_dies(name):
    config = compose_config(name, [])
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    model = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    assert dies % model == 0
    assert dies % (megatron.expert_model_parallel_size * megatron.pipeline_model_parallel_size) == 0
    assert dies % (rollout.tensor_model_parallel_size * rollout.data_parallel_size) == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu * megatron.context_parallel_size >= longest


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_verl_accepts_every_combination(verl_validation, name, method, scale):
    config = compose_config(name, [f"speculation={method}", f"scale={scale}"])
    verl_validation(config)
    assert config.speculation.method == method
    assert config.trainer.experiment_name == f"{name}_{method}"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("method", METHODS)
def test_the_config_for_eight_gpus(verl_validation, method, scale):
    config = compose_config("dapo_qwen3_8b_cuda", [f"speculation={method}", f"scale={scale}"])
    verl_validation(config)
    assert config.trainer.device == ("cuda" if scale == "full" else "cpu")
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.parametrize("name", ["dapo_qwen3_32b", "dapo_qwen3_32b_128die"])
def test_fsdp2_is_an_option_for_the_dense_model(verl_validation, name):
    config = compose_config(name, ["training=fsdp2"])
    verl_validation(config)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_vllm_accepts_the_very_command_line(name, scale):
    from recipe.vllm_command import vllm_arguments

    config = compose_config(name, [f"scale={scale}"])
    command, parsed = vllm_arguments(config)
    assert parsed.max_num_seqs == config.actor_rollout_ref.rollout.max_num_seqs
    assert parsed.tensor_parallel_size == config.actor_rollout_ref.rollout.tensor_model_parallel_size
    assert parsed.speculative_config["model"] == "sam.vllm.proposer.SamProposer"
    assert parsed.additional_config["speculation"]["verification"] == "exact"
    assert parsed.enable_expert_parallel == ("235b" in name and scale == "full")
    if scale == "full":
        assert json.loads(command[command.index("--compilation_config") + 1])["cudagraph_mode"] == "FULL"


def test_what_vllm_does_not_know_is_refused_in_its_own_words():
    from recipe.vllm_command import vllm_arguments

    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_number_of_sequences"
    with pytest.raises(ValueError, match="unrecognized arguments: --max-number-of-sequences"):
        vllm_arguments(compose_config("dapo_qwen3_32b", [f"+{key}=3"]))


def test_no_setting_is_written_twice():
    """What a primary config sets, no shared file that it composes sets to the same value."""
    lines = {path: set(re.findall(r"^ +\w+: .+$", path.read_text(), flags=re.M)) for path in CONFIGS.rglob("*.yaml")}
    for name in NAMES:
        primary = CONFIGS / f"{name}.yaml"
        for shared in (CONFIGS / "shared").glob("*.yaml"):
            if shared.name != "cpu.yaml":
                assert not lines[primary] & lines[shared], (name, shared.name)


def test_every_file_says_what_it_is():
    for path in CONFIGS.rglob("*.yaml"):
        head = [line for line in path.read_text().splitlines() if not line.startswith("# @package")][0]
        assert head.startswith("# "), path


def test_every_config_has_a_script_that_runs_it():
    scripts = Path(__file__).parents[2] / "scripts"
    for path in CONFIGS.glob("dapo_*.yaml"):
        assert path.stem in (scripts / f"run_{path.stem}.sh").read_text()
