"""vllm-ascend 0.23.0.post1's source package, from the package index."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

_SHA256 = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"


def ascend_source(cache: Path) -> Path:
    """The source package in `cache`, downloaded if it is not there."""
    if not (path := cache / "vllm_ascend-0.23.0.post1.tar.gz").exists():
        cache.mkdir(parents=True, exist_ok=True)
        # pip asks a source package for its metadata, for which its setup.py needs setuptools-scm, of the extra dev;
        # without the two variables it looks for a device.
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary=vllm-ascend", "--dest", str(cache))
        command = [sys.executable, "-m", "pip", "download", *options, "vllm-ascend==0.23.0.post1"]
        environment = {**os.environ, "COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
        subprocess.run(command, check=True, env=environment)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == _SHA256, f"{path} is not the published one: delete it, it will be fetched again"
    return path
