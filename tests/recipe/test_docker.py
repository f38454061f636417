"""The container files: linted, everything they name is there, and the CPU one's steps executed without an engine."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import checks, report

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
PLACE = "/opt/sam_rollout"
MINUTES = 60
# These would change the machine that the test runs on.
SYSTEM_COMMANDS = ("apt-get", "useradd")

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def steps(path):
    """[(instruction, the rest of it)], continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def copied(arguments):
    """(sources, destination) of a COPY."""
    *sources, destination = [word for word in shlex.split(arguments) if not word.startswith("--")]
    return sources, destination


def let_in(path):
    """The names at top level that the file's .dockerignore lets into the build."""
    lines = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert [line for line in lines if line and line[0] not in "#!"][0] == "*"
    return [line[1:] for line in lines if line.startswith("!")]


def as_script(path, root):
    """The file as a bash script in which `root` stands for /. What is copied is what git knows and does not ignore."""
    place = str(root) + PLACE
    shell, lines = ["/bin/sh", "-c"], ["set -euo pipefail"]
    for instruction, rest in steps(path):
        said = f"echo {shlex.quote(f'== {instruction} {rest}')}"
        here = rest.replace(PLACE, place)
        match instruction:
            case "ARG":
                name, value = here.split("=", 1)
                lines += [said, f'export {name}="${{{name}-{value}}}"']
            case "ENV":
                lines += [said, *(f'export {name}="{value}"' for name, value in re.findall(r"(\w+)=(\S+)", here))]
            case "SHELL":
                shell = json.loads(rest)
            case "WORKDIR":
                lines += [said, f"mkdir -p {shlex.quote(here)}", f"cd {shlex.quote(here)}"]
            case "COPY":
                lines += [said, _copy(*copied(here), let_in(path))]
            case "RUN":
                command = re.sub(r"--mount=\S+\s+", "", here).strip()
                if command.startswith(SYSTEM_COMMANDS):
                    lines.append(f"echo {shlex.quote(f'-- left out, changes the machine: {rest}')}")
                else:
                    lines += [said, shlex.join([*shell, command])]
            case _:
                lines.append(f"echo {shlex.quote(f'-- left out, needs an engine: {instruction} {rest}')}")
    return "\n".join(lines) + "\n"


def _copy(sources, destination, names):
    wanted = names if sources == ["."] else sources
    return (
        f"mkdir -p {shlex.quote(destination)}\n"
        f"git -C {shlex.quote(str(ROOT))} ls-files -z --deduplicate --cached --others --exclude-standard -- "
        f"{shlex.join(wanted)} | tar --create --directory {shlex.quote(str(ROOT))} --null --files-from - "
        f"--ignore-failed-read | tar --extract --directory {shlex.quote(destination)}"
    )


def execute(script, environment, seconds):
    return subprocess.run(
        ["bash", "-c", script], env=environment, timeout=seconds, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def clean_environment():
    """Without the environment that the test runs in."""
    away = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in away}
    places = [place for place in os.environ["PATH"].split(":") if not place.startswith(str(ROOT))]
    return {**kept, "PATH": ":".join(places), "PYTHON": sys._base_executable}


@every_file
def test_the_linter_has_nothing_to_say(path):
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter, "hadolint is missing: bash scripts/test.sh installs it (requirements/dev.txt)"
    finished = subprocess.run([linter, "--no-color", path], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


@every_file
def test_the_base_image_is_pinned(path):
    arguments = dict(rest.split("=", 1) for instruction, rest in steps(path) if instruction == "ARG")
    (base,) = [rest.split()[-1] for instruction, rest in steps(path) if instruction == "FROM"]
    image = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base)
    assert re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", image), image


@every_file
def test_everything_that_is_named_is_there_and_let_in(path):
    names = let_in(path)
    found = 0
    for instruction, rest in steps(path):
        if instruction == "COPY":
            wanted = [source for source in copied(rest)[0] if source != "."]
        elif instruction in ("RUN", "CMD"):
            wanted = re.findall(r"(?<![\w/.])((?:scripts|docker|requirements|recipe|configs)/[\w./-]+)", rest)
            modules = re.findall(r"-m (recipe[\w.]*)", rest)
            assert all(importlib.util.find_spec(module) for module in modules)
        else:
            continue
        found += len(wanted)
        for one in wanted:
            assert (ROOT / one).exists() and one.split("/")[0] in names, one
    assert found and all((ROOT / name).exists() for name in names)


@every_file
def test_preflight_is_the_last_layer(path):
    last = [rest for instruction, rest in steps(path) if instruction in ("RUN", "COPY")][-1]
    config, *overrides = re.search(r"python docker/image_preflight.py (.+)$", last)[1].split()
    assert (ROOT / "configs" / f"{config}.yaml").exists()
    assert all((ROOT / "configs" / f"{one.replace('=', '/')}.yaml").exists() for one in overrides)


def test_both_let_the_same_in():
    first, *others = [path.with_name(f"{path.name}.dockerignore").read_text() for path in FILES]
    assert others and all(other == first for other in others)


def test_ascend_pins_fit_together():
    def pins(file):
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), flags=re.M))

    everything = pins("requirements/ascend.txt")
    # vLLM's wheel and what only it asks for are for CUDA; triton would be imported in triton-ascend's place.
    assert not [name for name in everything if name in ("vllm", "triton") or name.startswith(("nvidia-", "cuda-"))]
    # What vllm-ascend and torch-npu are tested with and what vllm-ascend forbids.
    simulated = pins("requirements/ascend-simulator.txt")
    for name in ("torch", "torch-npu", "decorator", "scipy"):
        assert everything[name] == simulated[name]
    assert "quart" in everything and tuple(map(int, everything["fastapi"].split(".")))[:2] < (0, 124)
    # What two files pin is pinned alike, so that nothing is installed twice.
    for name, version in pins("docker/ascend-build.txt").items():
        assert everything.get(name, version) == version
    vllm = pins("requirements/vllm.txt")["vllm"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={vllm}" in project["optional-dependencies"]["ascend"]
    for file in ("docker/ascend-a3.Dockerfile", "docs/ascend.md"):
        assert re.findall(r"VLLM_VERSION_OVERRIDE=(\S+)", (ROOT / file).read_text()) == [vllm]


def test_docs_install_on_ascend_as_the_image_does():
    def installs(text):
        joined = re.sub(r"\\\n\s*", "", text)
        return re.findall(r"pip (install --no-deps .*? -(?:r [\w./-]+|e \.))", joined)

    page, image = [(ROOT / file).read_text() for file in ("docs/ascend.md", "docker/ascend-a3.Dockerfile")]
    assert installs(page) == installs(image) and len(installs(page)) == 5


def test_steps_become_a_script(tmp_path):
    file = tmp_path / "toy.Dockerfile"
    file.write_text(
        "FROM debian:12.1\n"
        'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\n'
        "RUN apt-get update && \\\n    apt-get install nothing\n"
        f"WORKDIR {PLACE}\n"
        "# a comment\n"
        "COPY --chown=1:1 . .\n"
        "ARG GREETING=hello\n"
        f"ENV WHERE={PLACE}/scripts NAME=world\n"
        'RUN --mount=type=cache,target=/x source "$WHERE/environment.sh" && echo "$GREETING $NAME $PWD"; false | cat\n'
        'CMD ["bash"]\n'
    )
    (tmp_path / "toy.Dockerfile.dockerignore").write_text("*\n!LICENSE\n!scripts\n")
    finished = execute(as_script(file, tmp_path / "root"), clean_environment(), 60)
    place = tmp_path / "root" / PLACE[1:]
    assert finished.returncode == 1, "pipefail was not heeded"
    assert (
        f"hello world {place}\n" in finished.stdout and "-- left out, changes the machine: apt-get" in finished.stdout
    )
    assert sorted(path.name for path in place.iterdir()) == ["LICENSE", "scripts"]


def test_an_image_is_judged_by_its_packages(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("image_preflight", DOCKER / "image_preflight.py")
    image_preflight = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(image_preflight)
    config = compose_config("dapo_qwen3_32b", ["training=fsdp2"])
    monkeypatch.setattr(image_preflight, "compose_config", lambda name, overrides: config)
    parsed = {name: [] for name in image_preflight.PARSERS}
    reported = {"problems": {**parsed, "data and model": ["no data"]}}
    monkeypatch.setattr(report, "report", lambda config, dry_run: reported)
    # In this environment vllm-ascend is missing, and that is seen although there is no NPU either.
    assert image_preflight.main("dapo_qwen3_32b", "training=fsdp2") == 2
    said = capsys.readouterr().out
    assert "vllm-ascend is not installed" in said and "no data" not in said
    subjects = dict.fromkeys(image_preflight.PACKAGES, ())
    monkeypatch.setattr(checks, "checks", lambda config: {**subjects, "batches": ["wrong"]})
    assert image_preflight.main("dapo_qwen3_32b") == 0
    reported["problems"]["verl's own validation"] = ["verl refuses the config"]
    assert image_preflight.main("dapo_qwen3_32b") == 2


@pytest.mark.long
def test_the_steps_of_the_cpu_file_in_a_clean_folder(tmp_path):
    """Downloads what the package manager's cache does not have (3 GB); the installed copy needs 7 GB of disk."""
    root = tmp_path / "root"
    place = root / PLACE[1:]
    try:
        finished = execute(as_script(DOCKER / "cpu.Dockerfile", root), clean_environment(), 60 * MINUTES)
        print(finished.stdout)
        assert finished.returncode == 0, finished.stdout[-3000:]
        assert '"vLLM\'s argument parser": []' in finished.stdout
        where = "import sam, sys, vllm; print(sys.prefix, sam.__path__[0], vllm.__file__)"
        command = [place / ".venv" / "bin" / "python", "-c", where]
        said = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        assert said.count(str(place)) == 3, said
        assert not any((place / name).exists() for name in ("tests", "docs", ".git"))
    finally:
        shutil.rmtree(root, ignore_errors=True)
