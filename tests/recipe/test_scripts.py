"""The scripts: what they say when they are used wrongly, and what they hand on."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.launch import run_lock
from recipe.launch.config import compose_config
from recipe.trainer.task_runner import ray_arguments
from tests.recipe.preflight.preflight_node import write_model

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def stand_in(tmp_path):
    """python and ray as programs that print how they were called; ray status says that nothing runs."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "python $*"\nenv | grep -E "^(HCCL|TASK|RAY_A|VLLM_ASCEND)"\n')
    (tmp_path / "ray").write_text('#!/bin/sh\n[ "$1" = status ] && exit ${RAY_STATUS:-1}\necho "ray $*"\n')
    for name in ("python", "ray"):
        (tmp_path / name).chmod(0o755)
    ours = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE", "PORT", "HUB")
    }
    return {**ours, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


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


@pytest.mark.parametrize(("token", "mode"), [({}, "disabled"), ({"RAY_AUTH_TOKEN": "0" * 64}, "token")])
def test_ray_asks_for_a_token_where_one_was_set(stand_in, token, mode):
    """And not where an old one lies in somebody's HOME, which Ray 2.60 would take."""
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment={**stand_in, **token})
    assert f"RAY_AUTH_MODE={mode}\n" in said


def test_a_variable_that_is_set_stays(stand_in):
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment={**stand_in, "HCCL_CONNECT_TIMEOUT": "7"})
    assert "HCCL_CONNECT_TIMEOUT=7" in said


def test_the_scripts_for_a_cpu_start_what_the_readme_says(tmp_path):
    """With stand-ins for the environment and for python, which prints its arguments."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "python $*"\n')
    (tmp_path / "python").chmod(0o755)
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text(
        "set_up_environment() { :; }\nset_up_ascend_simulator() { :; }\nruff() { :; }\n"
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."\n'
    )

    def said(script, *arguments):
        command = ["bash", tmp_path / "scripts" / script, *arguments]
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment).stdout

    quickstart = said("quickstart.sh")
    assert quickstart.index("speculation=sam run_dir=") < quickstart.index("speculation=off run_dir=")
    assert "python -m recipe.against_stock outputs/quickstart/sam --output outputs/quickstart\n" in quickstart
    assert "python -m recipe.report outputs/quickstart/sam outputs/quickstart/off" in quickstart
    assert "--config-name dapo_tiny_cpu speculation=off" in said("run_dapo_tiny_cpu.sh", "speculation=off")
    smollm2 = said("run_dapo_smollm2_cpu.sh", "speculation=off")
    assert "python -m recipe.smollm2.assets --output outputs/smollm2_assets" in smollm2
    assert smollm2.startswith("python -m recipe.main_dapo --config-name dapo_smollm2_cpu --check speculation=off\n")
    assert smollm2.endswith("--config-name dapo_smollm2_cpu speculation=off\n")
    assert "-m recipe.data --output data" in said("prepare_data.sh")
    assert "python -m pytest" in said("test.sh") and "tests/ascend" in said("test.sh", "--ascend")


def note_of_ray(stand_in, folder, address):
    """As `ray start` leaves it on every node of a cluster."""
    (folder / "ray_notes" / "ray").mkdir(parents=True)
    (folder / "ray_notes" / "ray" / "ray_current_cluster").write_text(address)
    return {**stand_in, "RAY_STATUS": "0", "RAY_TMPDIR": str(folder / "ray_notes")}


def test_a_cluster_that_runs_is_joined(stand_in, tmp_path):
    environment = {**stand_in, "RAY_STATUS": "0", "RAY_TMPDIR": str(tmp_path)}
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment=environment)
    assert "joining the Ray cluster that runs on this node, auto" in said and "RAY_ADDRESS=auto" in said
    _, said, _ = run("run_dapo_qwen3_32b.sh", environment=note_of_ray(stand_in, tmp_path, "10.0.0.1:6379"))
    assert "runs on this node, 10.0.0.1:6379" in said and "RAY_ADDRESS=10.0.0.1:6379" in said


def test_smoke_runs_on_this_machine_whatever_cluster_there_is(stand_in):
    environment = {**stand_in, "RAY_STATUS": "0", "RAY_ADDRESS": "10.0.0.1:6379"}
    code, said, _ = run("run_dapo_qwen3_32b.sh", "scale=smoke", environment=environment)
    assert code == 0 and "joining" not in said and "RAY_ADDRESS" not in said


# The scripts with the real python, so that the recipe itself says what is wrong; ray stays a stand-in.


@pytest.fixture
def real_python(stand_in, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return stand_in


def refusal(environment, *overrides):
    code, said, error = run("run_dapo_qwen3_32b.sh", *overrides, environment=environment)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, (said, error)
    return error


def test_without_ray_a_run_of_two_nodes_says_what_to_start(real_python, tmp_path):
    error = refusal({**real_python, "RAY_TMPDIR": str(tmp_path)})
    assert error.startswith("error: trainer.nnodes=2: ") and "[ray.no_head]" in error
    assert "bash scripts/start_ray_cluster.sh head here, worker HEAD_ADDRESS on the other nodes" in error


def test_on_a_worker_a_run_names_the_node_to_start_it_on(real_python, tmp_path):
    error = refusal(note_of_ray(real_python, tmp_path, "198.51.100.7:6379"))
    assert "RAY_ADDRESS=198.51.100.7:6379" in error and "start the run on 198.51.100.7 [ray.not_head]" in error


def test_after_ray_has_ended_a_run_says_so(real_python, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    error = refusal({**real_python, "RAY_ADDRESS": address})
    assert error.startswith(f"error: RAY_ADDRESS={address}: ") and "[ray.no_answer]" in error


def test_a_second_run_in_a_directory_says_so(real_python, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as head, run_lock.lock(tmp_path / "run"):
        environment = {**real_python, "RAY_ADDRESS": f"127.0.0.1:{head.getsockname()[1]}"}
        error = refusal(environment, f"run_dir={tmp_path}/run")
    assert f"run_dir={tmp_path}/run is used by a run that goes on (process {os.getpid()}, since " in error
    assert "wait for it, stop it, or choose another run_dir= [run_dir.in_use]" in error


def test_ray_head_and_worker(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment = {**stand_in, "PORT": str(port)}
        _, said, _ = run("start_ray_cluster.sh", "worker", "127.0.0.1", environment=environment)
        assert f'ray start --address 127.0.0.1:{port} --resources {{"NPU": 16}}' in said
        code, _, error = run("start_ray_cluster.sh", "head", environment=environment)
        assert code == 2 and f"port {port} is taken by another program on this node: stop it, or set PORT" in error
    _, said, _ = run("start_ray_cluster.sh", "head", environment=environment)
    assert f'ray start --head --port {port} --resources {{"NPU": 16}}' in said
    code, _, error = run("start_ray_cluster.sh", "worker", "127.0.0.1", environment=environment)
    assert (
        code == 2 and f"no Ray answers at 127.0.0.1:{port}: run bash scripts/start_ray_cluster.sh head there" in error
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], "1", "error: nothing: expected head, worker HEAD_ADDRESS or stop"),
        (["worker"], "1", "worker needs the head's address"),
        (["head"], "0", "a Ray runs on this node already: stop it with bash scripts/start_ray_cluster.sh stop"),
        (["worker", "127.0.0.1"], "0", "a Ray runs on this node already"),
        (["start"], "1", "error: start: expected head, worker HEAD_ADDRESS or stop"),
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


# A hub's program that is interrupted the first time and goes on the second.
DOWNLOAD = """#!/bin/sh
echo "$0 $*" >>"$CALLS"
for folder; do :; done
mkdir -p "$folder"
if [ ! -f "$folder/config.json" ]; then
    cp "$PUBLISHED/config.json" "$folder"
    echo "connection reset" >&2
    exit 1
fi
cp "$PUBLISHED"/* "$folder"
"""


@pytest.fixture
def hub(stand_in, tmp_path):
    write_model(tmp_path / "published")
    for name in ("hf", "modelscope"):
        (tmp_path / name).write_text(DOWNLOAD)
        (tmp_path / name).chmod(0o755)
    places = {"CALLS": tmp_path / "calls", "PUBLISHED": tmp_path / "published", "MODELS_DIR": tmp_path / "models"}
    return {**stand_in, "HF_HUB_OFFLINE": "1", **{name: str(path) for name, path in places.items()}}


@pytest.mark.parametrize(
    ("hub_name", "call"),
    [
        ("huggingface", "hf download Qwen/Qwen3-32B --local-dir {}/Qwen3-32B"),
        ("modelscope", "modelscope download --model Qwen/Qwen3-32B --local_dir {}/Qwen3-32B"),
    ],
)
def test_a_models_download_goes_on_and_is_checked(hub, tmp_path, hub_name, call):
    environment = {**hub, "HUB": hub_name}
    code, _, error = run("prepare_model.sh", "Qwen3-32B", environment=environment)
    assert (
        code == 2 and "Qwen/Qwen3-32B was not fetched to the end: run this again, it goes on where it stopped" in error
    )
    code, said, _ = run("prepare_model.sh", "Qwen3-32B", environment=environment)
    assert code == 0 and "models/Qwen3-32B: complete, 0.0 GB of weights" in said
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and calls[1].endswith(call.format(tmp_path / "models"))


def test_a_models_copy_is_checked_without_a_network(hub, tmp_path):
    environment = {**hub, "HUB": "none"}
    folder = tmp_path / "models" / "Qwen3-8B"
    shutil.copytree(tmp_path / "published", folder)
    assert run("prepare_model.sh", "Qwen/Qwen3-8B", environment=environment)[0] == 0
    (folder / "model-00001-of-00002.safetensors").unlink()
    code, _, error = run("prepare_model.sh", "Qwen3-8B", environment=environment)
    assert code == 2 and "1 of 2 shards of model.safetensors.index.json" in error and "[model.missing]" in error
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("arguments", "hub_name", "message"),
    [
        ([], "huggingface", "no model named: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME"),
        (["Llama"], "huggingface", "Llama: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME"),
        (["Qwen3-32B"], "hub", "HUB=hub: expected huggingface, modelscope or none"),
    ],
)
def test_a_model_asked_for_wrongly(hub, arguments, hub_name, message):
    code, _, error = run("prepare_model.sh", *arguments, environment={**hub, "HUB": hub_name})
    assert code == 2 and error == f"error: {message}\n"


def test_every_script_is_sound():
    for path in SCRIPTS.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "message"),
    [
        ("download_packages.sh", [], {}, "expected a folder and extras: bash scripts/download_packages.sh"),
        ("download_packages.sh", ["folder", "gpu"], {}, "gpu: expected some of cpu, smollm2, cuda, dev"),
        ("bench_cuda.sh", [], {"PACKAGES": "/nowhere"}, "PACKAGES=/nowhere: no such folder"),
    ],
)
def test_packages_that_are_carried_wrongly(stand_in, script, arguments, variables, message):
    code, _, error = run(script, *arguments, environment=stand_in | variables)
    assert code == 1 and error.startswith("error: ") and message in error and error.count("\n") == 1


def test_carried_packages_take_the_place_of_an_index(stand_in, tmp_path):
    script = f"source {SCRIPTS}/environment.sh; env"
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=stand_in | {"PACKAGES": tmp_path})
    for name in ("PIP", "UV"):
        assert f"{name}_NO_INDEX=1\n" in said.stdout and f"{name}_FIND_LINKS={tmp_path}\n" in said.stdout
