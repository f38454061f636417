"""The scripts: what they say when they are used wrongly, and what they hand on."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipe.sam_dapo.launch.config import compose_config
from recipe.sam_dapo.trainer import ray_arguments
from tests.recipe.sam_dapo.preflight.preflight_node import write_model

SCRIPTS = Path(__file__).parents[3] / "scripts"


def program(path, text):
    """A program of the shell's."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(script, *arguments, scripts=SCRIPTS, **environment):
    command = ["bash", scripts / script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def stand_in(tmp_path):
    """python and ray as programs that print how they were called; ray status says that nothing runs."""
    program(tmp_path / "python", 'echo "python $*"\nenv | grep -E "^(HCCL|TASK|RAY_A|VLLM_ASCEND)"')
    program(tmp_path / "ray", '[ "$1" = status ] && exit ${RAY_STATUS:-1}\necho "ray $*"')
    others = ("RAY_ADDRESS", "RAY_AUTH_MODE", "PORT", "HUB")
    ours = {name: value for name, value in os.environ.items() if name not in others}
    return {**ours, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_run_scripts_hand_config_overrides_and_variables_on(stand_in, token):
    """Ray asks for a token where one was set, not where an old one lies in a HOME, which Ray 2.60 would take."""
    for name in ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b"):
        given = stand_in | {"HCCL_CONNECT_TIMEOUT": "7", "RAY_AUTH_TOKEN": token}
        code, said, _ = run(f"run_{name}.sh", "speculation=off", **given)
        assert code == 0 and f"python -m recipe.sam_dapo.main_dapo --config-name {name} speculation=off" in said
        assert "HCCL_OP_EXPANSION_MODE=AIV" in said and "TASK_QUEUE_ENABLE=1" in said and "RAY_ADDRESS" not in said
        assert "HCCL_CONNECT_TIMEOUT=7\n" in said, "one that is set stays"
        assert f"RAY_AUTH_MODE={'token' if token else 'disabled'}\n" in said


def test_a_cluster_that_runs_is_joined_but_for_a_smoke_run_and_gets_no_settings_of_a_ray_of_its_own(
    stand_in, tmp_path, monkeypatch
):
    environment = stand_in | {"RAY_STATUS": "0", "RAY_TMPDIR": str(tmp_path)}
    _, said, _ = run("run_dapo_qwen3_32b.sh", **environment)
    assert "joining the Ray cluster that runs on this node, auto" in said and "RAY_ADDRESS=auto" in said
    code, said, _ = run("run_dapo_qwen3_32b.sh", "scale=smoke", **environment, RAY_ADDRESS="10.0.0.1:6379")
    assert code == 0 and "joining" not in said and "RAY_ADDRESS" not in said
    config = compose_config("dapo_tiny_cpu", [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_arguments(config, "/scratch")["_temp_dir"] == "/scratch"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not {"_temp_dir", "num_cpus", "num_gpus", "include_dashboard"} & {*ray_arguments(config, "/scratch")}


def test_the_scripts_for_a_cpu_start_what_the_readme_says(tmp_path):
    """With stand-ins for the environment and for python, which prints its arguments."""
    program(tmp_path / "python", 'echo "python $*"')
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    without = ("set_up_environment", "check_run", "help_if_asked")
    text = "".join(f"{name}() {{ :; }}\n" for name in without) + 'cd "$(dirname "${BASH_SOURCE[0]}")/.."\n'
    (tmp_path / "scripts" / "environment.sh").write_text(text)

    def said(script, *arguments):
        path = f"{tmp_path}:{os.environ['PATH']}"
        code, said, _ = run(script, *arguments, scripts=tmp_path / "scripts", PATH=path)
        assert code == 0
        return said

    quickstart = said("quickstart.sh")
    assert quickstart.index("speculation=sam run_dir=") < quickstart.index("speculation=off run_dir=")
    assert "command_line bench --run outputs/quickstart/sam --output outputs/quickstart\n" in quickstart
    assert "command_line report outputs/quickstart/sam outputs/quickstart/off" in quickstart
    smollm2 = said("run_dapo_smollm2_cpu.sh", "speculation=off")
    assert smollm2.startswith(
        "python -m recipe.sam_dapo.main_dapo --config-name dapo_smollm2_cpu --check speculation=off\n"
    )
    assert "python -m recipe.sam_dapo.smollm2.assets --output outputs/smollm2_assets" in smollm2
    assert smollm2.endswith("--config-name dapo_smollm2_cpu speculation=off\n")


def test_a_models_download_is_checked_as_a_copy_without_a_network_is(stand_in, tmp_path):
    """With the real python; one hub's program is interrupted."""
    write_model(tmp_path / "published")
    program(tmp_path / "python", f'exec {sys.executable} "$@"')
    program(tmp_path / "hf", 'echo "hf $*"\nexit 1')
    fetch = f'for folder; do :; done\nmkdir -p "$folder"\ncp {tmp_path}/published/* "$folder"'
    program(tmp_path / "modelscope", f'echo "modelscope $*"\n{fetch}')
    folder = tmp_path / "models" / "Qwen3-32B"

    def prepared(hub):
        return run("prepare_model.sh", "Qwen3-32B", **stand_in, HUB=hub, MODELS_DIR=str(folder.parent))

    code, said, error = prepared("huggingface")
    assert code == 2 and said == f"hf download Qwen/Qwen3-32B --local-dir {folder}\n"
    assert "Qwen/Qwen3-32B was not fetched to the end: run this again, it goes on where it stopped" in error
    code, said, _ = prepared("modelscope")
    assert code == 0 and said.startswith(f"modelscope download --model Qwen/Qwen3-32B --local_dir {folder}\n")
    assert "models/Qwen3-32B: complete, 0.0 GB of weights" in said
    (folder / "model-00001-of-00002.safetensors").unlink()
    code, _, error = prepared("none")
    assert code == 2 and "1 of 2 shards of model.safetensors.index.json" in error and "[model.missing]" in error


MISTAKES = {
    "run_dapo_qwen3_8b_cuda.sh --verbos": "unrecognized arguments: --verbos",
    "run_dapo_tiny_cpu.sh PYTHON=/usr/bin/false": "PYTHON=/usr/bin/false: no Python 3.11 or 3.12 found",
    "bench_cuda.sh PACKAGES=/nowhere": "PACKAGES=/nowhere: no such folder",
    "download_packages.sh folder cdua": "cdua: expected some of cpu, smollm2, cuda, dev",
    "prepare_model.sh Qwen3-8B Qwen3-23B": "Qwen3-23B: expected Qwen3-8B, Qwen3-32B, ",
    "prepare_model.sh Qwen3-8B HUB=hub": "HUB=hub: expected huggingface, modelscope or none",
    "prepare_data.sh dapo-mth": "dapo-mth is unknown: expected some of ",
    "start_ray_cluster.sh haed": "haed: expected head, worker HEAD_ADDRESS or stop",
}
SOURCED = ("arguments.sh", "environment.sh", "ascend_environment.sh")


def test_help_and_mistakes_are_answered_before_anything_is_installed(tmp_path):
    """On a machine with Python alone: no package, no ray, no hub's program."""
    for name in ("scripts", "configs", "sam", "recipe", "requirements", "tests/sam/verify"):
        shutil.copytree(SCRIPTS.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "programs").mkdir()
    for number in (11, 12):
        program(tmp_path / "programs" / f"python3.{number}", f'exec {sys.executable} -S -B "$@"')
    before = {*tmp_path.rglob("*")}

    def answer(call):
        """Code, stdout and stderr of a script with its words; VARIABLE=VALUE among them is set."""
        script, *words = call.split()
        variables = dict(word.split("=") for word in words if word.partition("=")[0].isupper())
        arguments = [word for word in words if word.partition("=")[0] not in variables]
        path = f"{tmp_path}/programs:/usr/bin:/bin"
        return run(script, *arguments, scripts=tmp_path / "scripts", PATH=path, **variables)

    scripts = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name not in SOURCED)
    calls = [*(f"{script} --help" for script in scripts), *MISTAKES]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, calls))
    for call, (code, said, error) in zip(calls, answers, strict=True):
        script = call.split()[0]
        if call in MISTAKES:
            assert code == 2 and MISTAKES[call] in error, (call, error)
            assert error.startswith("error: ") and error.count("\n") == 1, (call, error)
        else:
            assert (code, error) == (0, "") and f"scripts/{script}" in said and "set -euo" not in said, script
            subprocess.run(["bash", "-n", SCRIPTS / script], check=True)  # what comes behind the help is sound, too
            assert "--accept-changes" in said or not (script.startswith("run_") or script == "quickstart.sh"), script
    assert {*tmp_path.rglob("*")} == before, "something was made or installed"
