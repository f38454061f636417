"""The scripts for a cluster: what they say when they are used wrongly, and what they hand on."""

import os
import subprocess
from pathlib import Path

import pytest

from recipe.configuration import compose_config
from recipe.task_runner import ray_arguments

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def stand_in(tmp_path):
    """python and ray as programs that print how they were called; ray status says that nothing runs."""
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "python $*"\nenv | grep -E "^(HCCL|TASK|RAY_ADDRESS|VLLM_ASCEND)"\n'
    )
    (tmp_path / "ray").write_text('#!/bin/sh\n[ "$1" = status ] && exit ${RAY_STATUS:-1}\necho "ray $*"\n')
    for name in ("python", "ray"):
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def run(script, *arguments, environment):
    finished = subprocess.run(
        ["bash", SCRIPTS / script, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.parametrize("name", ["dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b"])
def test_run_scripts_hand_config_overrides_and_variables_on(stand_in, name):
    code, said, _ = run(f"run_{name}.sh", "speculation=off", environment=stand_in)
    assert code == 0
    assert f"python -m recipe.main_dapo --config-name {name} speculation=off" in said
    assert "HCCL_OP_EXPANSION_MODE=AIV" in said and "TASK_QUEUE_ENABLE=1" in said and "RAY_ADDRESS" not in said


def test_a_variable_that_is_set_stays(stand_in):
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment={**stand_in, "HCCL_CONNECT_TIMEOUT": "7"})
    assert "HCCL_CONNECT_TIMEOUT=7" in said


def test_a_cluster_that_runs_is_joined(stand_in):
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment={**stand_in, "RAY_STATUS": "0"})
    assert "joining the Ray cluster" in said and "RAY_ADDRESS=auto" in said


def test_ray_head_and_worker(stand_in):
    assert (
        'ray start --head --port 6379 --resources {"NPU": 16}'
        in run("start_ray_cluster.sh", "head", environment=stand_in)[1]
    )
    assert (
        "ray start --address 10.0.0.1:6379"
        in run("start_ray_cluster.sh", "worker", "10.0.0.1", environment=stand_in)[1]
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], "1", "error: nothing: expected head, worker HEAD_ADDRESS or stop"),
        (["worker"], "1", "worker needs the head's address"),
        (["head"], "0", "a Ray runs on this node already"),
    ],
)
def test_ray_used_wrongly_says_so(stand_in, arguments, status, message):
    code, _, error = run("start_ray_cluster.sh", *arguments, environment={**stand_in, "RAY_STATUS": status})
    assert code == 2 and message in error


def test_a_cluster_gets_no_settings_of_a_ray_of_its_own(monkeypatch):
    config = compose_config("dapo_tiny_cpu", [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = ray_arguments(config, "/scratch")
    assert own["_temp_dir"] == "/scratch" and own["num_cpus"] == 16
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not {"_temp_dir", "num_cpus", "num_gpus", "include_dashboard"} & set(ray_arguments(config, "/scratch"))


def test_every_script_is_sound():
    for path in SCRIPTS.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)
