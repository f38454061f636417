"""One thread for torch, as runs have it: the tensors here are small, so that threads mostly wait for each other.

And this project as users get it: `wheel`, and Pythons in which it is installed from that.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).parents[1]
# What plain vLLM's users have not; `sam` is to need none of it.
NOT_VLLMS = ("verl", "hydra", "omegaconf", "transfer_queue", "datasets", "wandb", "matplotlib", "reasoning_gym")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: what an earlier build has left in a checkout would be in it."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "build", "outputs", "__pycache__", "*.egg-info")
    source = shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=left_out)
    uv("build", "--quiet", "--wheel", "--out-dir", folder, source)
    return next(folder.glob("sam_rollout-*.whl"))


@pytest.fixture(scope="session")
def python_with_vllm(wheel, tmp_path_factory) -> Path:
    """A Python that has the wheel, and of this environment's packages those that vLLM needs."""
    return environment(tmp_path_factory.mktemp("with_vllm"), wheel, NOT_VLLMS)


@pytest.fixture(scope="session")
def python_with_verl(wheel, tmp_path_factory) -> Path:
    """A Python that has the wheel, and this environment's packages."""
    return environment(tmp_path_factory.mktemp("with_verl"), wheel, ())


def environment(folder: Path, wheel: Path, missing: tuple[str, ...]) -> Path:
    """A virtual environment of the wheel; this one's packages come behind it, without `missing`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    lines = [sysconfig.get_path("purelib"), f"import sys; sys.modules.update(dict.fromkeys({missing}))"]
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(lines) + "\n")
    return python


@pytest.fixture
def caplog(caplog):
    """Takes warnings whatever was imported: vLLM's API server sets all handlers of the root logger to ERROR."""
    caplog.handler.setLevel(0)
    return caplog


def uv(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("uv"), *arguments], check=True)
