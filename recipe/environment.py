"""Environment variables that verl, vLLM and Ray read, set once in one place before any of them is imported.

Ray's workers and vLLM's engine processes inherit them. A variable the user has set stays as it is.
"""

from __future__ import annotations

import os
from pathlib import Path

# No counting of usage, no looking for updates: runs must work, and behave the same, without network.
OFFLINE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_SILENT": "true",
}

CPU = {
    # The platform of recipe.tiny.platform.
    "VERL_PLATFORM": "cpu",
    # verl registers its FSDP engines for cuda and npu only; this is its own override.
    "VERL_ENGINE_DEVICE": "cuda",
    # GiB of KV cache: 32 k tokens of the tiny model need 0.2.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM binds its OpenMP threads to cores one by one otherwise, and then two runs share one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling kernels costs more than a tiny model's whole rollout.
    "TORCHDYNAMO_DISABLE": "1",
    # A second thread waits at barriers more than it computes in a model this small, on cores shared with Ray.
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def prepare(device: str, run_directory: Path, scratch_directory: Path) -> None:
    """Set the variables for a run.

    Args:
        device: `trainer.device` of the config: cpu, cuda or npu.
        run_directory: where wandb keeps its offline run.
        scratch_directory: private to this run, removed after it: sockets, locks, compiled kernels.
    """
    defaults = dict(OFFLINE)
    scratch = str(scratch_directory)
    os.environ["TMPDIR"] = scratch
    defaults["VLLM_RPC_BASE_PATH"] = scratch
    defaults["WANDB_DIR"] = str(run_directory)
    if not _has_wandb_key():
        defaults["WANDB_MODE"] = "offline"
    defaults.update(_writable_homes(scratch_directory))
    if device == "cpu":
        defaults.update(CPU)
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray refuses num_gpus=1 when it is set and empty
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return "wandb" in netrc.read_text()
    except OSError:
        return False


def _writable_homes(scratch: Path) -> dict[str, str]:
    """Homes for what libraries keep below HOME, when HOME cannot be written."""
    home = Path.home()
    if os.access(home, os.W_OK):
        return {}
    private = scratch / "home"
    private.mkdir(exist_ok=True)
    os.environ["HOME"] = str(private)
    return {"XDG_CACHE_HOME": str(private / ".cache"), "XDG_CONFIG_HOME": str(private / ".config")}
