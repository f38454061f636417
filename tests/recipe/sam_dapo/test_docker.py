"""The container files: linted, everything they name is there, and what they pin is pinned alike elsewhere."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def steps(path):
    """[(instruction, the rest of it)], continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_sound(path):
    """The linter has nothing to say, what is named is there and let in, preflight is last."""
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter, "hadolint is missing: bash scripts/test.sh installs it (requirements/dev.txt)"
    finished = subprocess.run([linter, "--no-color", path], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout
    found = steps(path)

    copied = [shlex.split(rest) for instruction, rest in found if instruction == "COPY"]
    named = [source for words in copied for source in words[:-1] if not source.startswith("--") and source != "."]
    run = "\n".join(rest for instruction, rest in found if instruction in ("RUN", "CMD"))
    named += re.findall(r"(?<![\w/.])((?:scripts|docker|requirements|recipe|configs)/[\w./-]+)", run)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert named and all((ROOT / name).exists() for name in (*named, *let_in))
    assert {name.split("/")[0] for name in named} <= let_in
    assert all(importlib.util.find_spec(module) for module in re.findall(r"-m (recipe\.[\w.]*)", run))

    last = [rest for instruction, rest in found if instruction in ("RUN", "COPY")][-1]
    config, *overrides = re.search(r"python docker/image_preflight.py (.+)$", last)[1].split()
    assert all((ROOT / "configs" / f"{one.replace('=', '/')}.yaml").exists() for one in (config, *overrides))


def test_ascend_pins_are_those_that_the_simulator_tests_and_the_page_installs_as_the_image_does():
    def pins(file):
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), flags=re.M))

    def installs(file):
        joined = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
        return re.findall(r"pip (install --no-deps .*? -(?:r [\w./-]+|e \.))|VLLM_VERSION_OVERRIDE=(\S+)", joined)

    image, simulated = pins("requirements/ascend.txt"), pins("requirements/ascend-simulator.txt")
    # vLLM's wheel and what only it asks for are for CUDA; triton would be imported in triton-ascend's place.
    assert not [name for name in image if name in ("vllm", "triton") or name.startswith(("nvidia-", "cuda-"))]
    tested = ("torch", "torch-npu", "decorator", "scipy")
    assert [image[name] for name in tested] == [simulated[name] for name in tested]
    found = installs("docker/ascend-a3.Dockerfile")
    assert len(found) == 6 and ("", pins("requirements/vllm.txt")["vllm"]) in found
    assert installs("docs/ascend.md") == found
