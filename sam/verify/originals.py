"""The looped verifier of vllm-ascend 0.11.0rc0, fetched from the package index: the reference for tests and bench."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import torch

_WHEEL = "vllm_ascend-0.11.0rc0-cp311-cp311-manylinux_2_24_x86_64.whl"
_SHA256 = "762b5846a281a93be4878e192025b602fce524569ff8924035685d447caaafda"
_MEMBER = "vllm_ascend/sample/rejection_sampler.py"
_STUBBED = "vllm.v1.sample.rejection_sampler"


def _wheel(cache: Path) -> Path:
    path = cache / _WHEEL
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.11", "--platform", "manylinux_2_24_x86_64", "--dest", str(cache)]
        result = subprocess.run([*command, "vllm-ascend==0.11.0rc0"], capture_output=True, text=True)
        if result.returncode or not path.exists():
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RuntimeError(
                f"vllm-ascend 0.11.0rc0, the reference of this comparison, cannot be fetched ({reason}): "
                f"make the package index reachable or put {_WHEEL} into {cache}"
            )
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != _SHA256:
        raise RuntimeError(f"{path} has SHA-256 {found}, expected {_SHA256}: delete it, it will be fetched again")
    return path


def load_looped_originals(cache: Path) -> types.ModuleType:
    """The module vllm_ascend.sample.rejection_sampler of 0.11.0rc0, downloaded into `cache` once.

    The vLLM module that it imports from is replaced while it loads: it asks for a function that vLLM 0.23 no longer
    has, and it overwrites one there.

    Raises:
        RuntimeError: the package cannot be fetched or is not the expected one.
    """
    source = zipfile.ZipFile(_wheel(cache)).read(_MEMBER).decode()
    names = ["vllm", "vllm.v1", "vllm.v1.sample", _STUBBED, "vllm.v1.spec_decode", "vllm.v1.spec_decode.metadata"]
    names.append("vllm.v1.sample.metadata")
    stubs = {name: types.ModuleType(name) for name in names}
    for name, stub in stubs.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stubs[parent], child, stub)
    stubs[_STUBBED].RejectionSampler = type("RejectionSampler", (torch.nn.Module,), {})
    stubs[_STUBBED].compute_probs = None
    stubs[_STUBBED].generate_uniform_probs = _generate_uniform_probs
    stubs["vllm.v1.spec_decode.metadata"].SpecDecodeMetadata = object
    stubs["vllm.v1.sample.metadata"].SamplingMetadata = object
    module = types.ModuleType("looped_originals")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(stubs)
    try:
        exec(compile(source, _MEMBER, "exec"), module.__dict__)
    finally:
        for name, previous in before.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous
    return module


def _generate_uniform_probs(num_tokens, num_draft_tokens, generators, device) -> torch.Tensor:
    """As in vLLM: one draw for all, then each seeded request's own."""
    uniforms = torch.rand((num_tokens,), dtype=torch.float64, device=device)
    start = 0
    for index, count in enumerate(num_draft_tokens):
        if count and index in generators:
            uniforms[start : start + count].uniform_(generator=generators[index])
        start += count
    return uniforms
