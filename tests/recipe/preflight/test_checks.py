"""What preflight finds before a process is started."""

import subprocess
import sys

import pytest

from recipe.launch import versions
from recipe.launch.config import ConfigError, compose_config
from recipe.preflight import checks, config_keys, machine
from tests.recipe.preflight.preflight_node import write_model


@pytest.fixture
def assets(tmp_path):
    (tmp_path / "train.parquet").touch()
    (tmp_path / "val.parquet").touch()
    write_model(tmp_path / "model")
    return tmp_path


def problems(assets, *overrides):
    return list(checks.find_problems(compose_config("dapo_tiny_cpu", [f"assets={assets}", *overrides])))


def test_good_config_has_no_problem(assets):
    assert problems(assets) == []


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.train_files=nowhere.parquet", "data.train_files=nowhere.parquet: no such file"),
        ("data.val_files=nowhere.parquet", "data.val_files=nowhere.parquet: no such file"),
        ("actor_rollout_ref.model.path=nowhere", "actor_rollout_ref.model.path=nowhere: no config.json"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "not a multiple of actor.ppo_mini_batch_size=3"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24", "size_per_gpu=24 does not divide the 32 responses"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=48", "=48 does not divide the 64 responses"),
        ("algorithm.filter_groups.enable=false", "data.gen_batch_size=12 does not divide data.train_batch_size=8"),
        ("data.gen_batch_size=4", "data.gen_batch_size=4 is below data.train_batch_size"),
        ("trainer.n_gpus_per_node=7", "not a multiple of the 7 devices"),
        ("actor_rollout_ref.rollout.n=1", "use 2 or more"),
        ("actor_rollout_ref.rollout.max_model_len=100", "actor_rollout_ref.rollout.max_model_len=100 is below"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=9999", "overlong_buffer_cfg.len=9999"),
    ],
)
def test_mistakes_name_value_and_mend(assets, override, message):
    found = problems(assets, override)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize("package", ["verl", "vllm", "torch"])
def test_wrong_version(assets, package, monkeypatch):
    original = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "0.0.1" if name == package else original(name))
    assert any(problem.startswith(f"{package} 0.0.1") for problem in problems(assets))


@pytest.mark.parametrize("minimum, word", [("MINIMUM_MEMORY_GIB", "memory"), ("MINIMUM_DISK_GIB", "disk")])
def test_not_enough_room(assets, minimum, word, monkeypatch):
    monkeypatch.setattr(machine, minimum, {"cpu": 10**6})
    assert any(f"GiB of {word} are free" in problem for problem in problems(assets))


def test_check_raises_the_first_and_counts_the_rest(assets):
    config = compose_config("dapo_tiny_cpu", ["assets=nowhere"])
    with pytest.raises(ConfigError, match=r"train_files=nowhere/train.parquet.*\(2 more\)"):
        checks.check(config)


def test_assets_that_are_still_to_be_built_are_no_problem_others_are(tmp_path):
    def found(*overrides):
        config = compose_config("dapo_tiny_cpu", [f"assets={tmp_path}/assets", *overrides])
        return list(checks.find_problems(config, to_be_built=tmp_path / "assets"))

    assert found() == []
    assert "nowhere" in found("data.train_files=nowhere.parquet")[0]


@pytest.mark.parametrize("name", ["dapo_tiny_cpu", "dapo_qwen3_32b", "dapo_qwen3_235b", "dapo_qwen3_8b_cuda"])
def test_every_key_of_a_config_is_known(name):
    assert list(config_keys.find_problems(compose_config(name, []))) == []
    assert list(config_keys.ray_problems(compose_config(name, []))) == []


def test_start_up_imports_nothing_that_takes_long(assets):
    """main_dapo runs these checks before it says anything."""
    code = (
        "import sys; from recipe.preflight import checks; from recipe.launch.config import compose_config\n"
        f"list(checks.find_problems(compose_config('dapo_tiny_cpu', ['assets={assets}'])))\n"
        "print(*{'ray', 'torch', 'transformers', 'verl', 'vllm'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""


def test_a_cluster_run_without_wandbs_key_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    warnings = list(checks.find_warnings(compose_config("dapo_qwen3_8b_cuda", [])))
    assert len(warnings) == 1 and "no key of wandb's here: the run is kept in" in warnings[0]
    assert list(checks.find_warnings(compose_config("dapo_tiny_cpu", []))) == []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert list(checks.find_warnings(compose_config("dapo_qwen3_8b_cuda", []))) == []
