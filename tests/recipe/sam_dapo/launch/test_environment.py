"""What a run's processes get as environment."""

import os

import pytest

from recipe.sam_dapo.launch import environment
from recipe.sam_dapo.launch.config import compose_config


@pytest.fixture
def bare(monkeypatch):
    before = dict(os.environ)
    for name in environment.FORWARDED:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    os.environ.clear()  # what `prepare` has set
    os.environ.update(before)


def test_threads_and_compilation_are_the_configs():
    tiny = environment.cpu_variables(compose_config("dapo_tiny_cpu", ["machine.threads=1"]))
    assert (tiny["OMP_NUM_THREADS"], tiny["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    compiled = ["machine.threads=null", "actor_rollout_ref.rollout.enforce_eager=false"]
    larger = environment.cpu_variables(compose_config("dapo_tiny_cpu", compiled))
    assert int(larger["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0)) and "TORCHDYNAMO_DISABLE" not in larger


@pytest.mark.parametrize(("machine", "mode"), [("api.wandb.ai", None), ("x.org", "offline")])
def test_wandbs_actor_gets_its_settings_but_not_its_key_and_is_offline_without_one(bare, tmp_path, machine, mode):
    bare.delenv("WANDB_API_KEY", raising=False)
    bare.setenv("NETRC", str(tmp_path / "netrc"))
    bare.setenv("WANDB_TAGS", "mine")
    (tmp_path / "netrc").write_text(f"machine {machine} login user password {'0' * 40}\n")
    environment.prepare(config := compose_config("dapo_tiny_cpu", [f"run_dir={tmp_path}/run"]), tmp_path)
    os.environ["WANDB_API_KEY"] = "secret"
    forwarded = environment.ray_runtime_env(config)["env_vars"]
    assert (forwarded["WANDB_RUN_GROUP"], forwarded["WANDB_JOB_TYPE"]) == (f"dapo_tiny_cpu_seed{config.seed}", "sam")
    assert forwarded["WANDB_DIR"] == str(tmp_path / "run") and forwarded["WANDB_TAGS"] == "mine"
    assert forwarded.get("WANDB_MODE") == mode and "WANDB_API_KEY" not in forwarded
