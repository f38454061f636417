"""Environment variables that verl, vLLM and Ray read, set once in one place before any of them is imported.

Ray's workers and vLLM's engine processes inherit them. A variable the user has set stays as it is.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import DictConfig

from sam.config import HUGE_PAGES

# No counting of usage, no looking for updates: runs must work, and behave the same, without network.
OFFLINE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_SILENT": "true",
}
# How long Ray's processes wait for each other when they start, by default 5 to 60 s: on a busy machine it takes longer.
# Not all of it can be set (start_ray of sam_recipe.trainer).
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
# vLLM 0.23 would run dense Qwen3 on CUDA with its second model runner, whose sampler sam.vllm does not replace.
FIRST_MODEL_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CPU = HUGE_PAGES | {
    # The platform of sam_recipe.tiny.platform; verl registers its FSDP engines for cuda and npu only.
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # GiB of KV cache: 32 k tokens of the tiny model need 0.2.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM binds its OpenMP threads to cores one by one otherwise, and then two runs share one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Nothing is compiled unless the config says so (cpu_variables).
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    # Waiting threads look around for some 20 us, then leave the cores to the other processes. They would sleep at once
    # with OMP_WAIT_POLICY=PASSIVE, which makes forward passes of two threads twice as long, or block them for long.
    "GOMP_SPINCOUNT": "20000",
    # Lets vLLM's engine process run the model itself (distributed_executor_backend=uni); a worker process of its own
    # would cost 20 s of imports and milliseconds in every step. The engine still has its own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads of TransferQueue's tensor copies.
    "TQ_NUM_THREADS": "1",
    # Colours make a log file unreadable.
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# What verl gives every Ray process (verl/trainer/constants_ppo.py) unless the user has set it; here, because importing
# that imports all of verl. A test compares.
RAY_WORKERS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "VERL_FULL_DETERMINISM": "0",
    "VLLM_BATCH_INVARIANT": "0",
    "VERL_RL_INSIGHT_ENABLE": "0",
}
# What a Ray that runs already does not inherit from here: OFFLINE, verl's, and wandb's, which verl calls in an actor.
# Not its key: a runtime_env can be read in Ray's dashboard and logs.
FORWARDED = (
    "VERL_FULL_DETERMINISM VLLM_BATCH_INVARIANT VERL_RL_INSIGHT_ENABLE "
    "PYTHONHASHSEED CUBLAS_WORKSPACE_CONFIG FLASH_ATTENTION_DETERMINISTIC NCCL_DETERMINISTIC NCCL_ALGO "
    "WANDB_RUN_ID WANDB_RESUME WANDB_RUN_GROUP WANDB_JOB_TYPE WANDB_TAGS WANDB_DIR WANDB_MODE WANDB_ENTITY "
    "WANDB_BASE_URL VLLM_USE_V2_MODEL_RUNNER"
).split() + list(OFFLINE)
WANDB_RUN_FILE = "wandb_run_id"  # in run_dir


def ray_runtime_env(device: str) -> dict:
    """Ray's `runtime_env` of a run: verl's own variables for all its processes, wandb's, and a CPU's."""
    own = {name: value for name, value in (RAY_WORKERS | FIRST_MODEL_RUNNER).items() if name not in os.environ}
    names = [*FORWARDED, *(CPU if device == "cpu" else ())]
    forwarded = {name: os.environ[name] for name in names if name in os.environ}
    return {"env_vars": {**own, **forwarded, "TRANSFER_QUEUE_ENABLE": "1"}, "working_dir": None}


def name_wandb_run(run_directory: Path, goes_on: bool) -> None:
    """Note the id by which wandb knows a run: of one that goes on, the id that it had."""
    path = run_directory / WANDB_RUN_FILE
    if not (goes_on and path.exists()):
        path.write_text(os.environ.get("WANDB_RUN_ID", secrets.token_hex(4)) + "\n")


def has_wandb_key() -> bool:
    """Whether wandb would find a key without asking: in WANDB_API_KEY, or where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    # wandb 0.31 logs in to forge.coreweave.com, earlier ones to wandb.ai; an own server is named by WANDB_BASE_URL.
    hosts = ["wandb", "coreweave.com", urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc]
    with suppress(OSError):
        text = Path(os.environ.get("NETRC", "~/.netrc")).expanduser().read_text()
        return any(host and host in text for host in hosts)
    return False


def cpu_variables(config: DictConfig) -> dict[str, str]:
    """CPU, with the threads of `machine.threads`, and with compiled engines where rollout.enforce_eager is off."""
    variables = {**CPU, "OMP_NUM_THREADS": str(config.machine.threads or len(os.sched_getaffinity(0)))}
    if not config.actor_rollout_ref.rollout.enforce_eager:
        del variables["TORCHDYNAMO_DISABLE"]
    return variables


def prepare(config: DictConfig, folder: Path) -> None:
    """Set the variables for a run; its private `folder` is for sockets, locks, compiled kernels."""
    defaults = OFFLINE | PATIENT | FIRST_MODEL_RUNNER
    # verl passes wandb.init a project and a name only; the rest wandb reads from its environment. Runs of one config
    # and seed are shown together, each with its drafter.
    defaults |= {
        "WANDB_RUN_GROUP": f"{config.config_name}_seed{config.seed}",
        "WANDB_JOB_TYPE": config.speculation.method,
        "WANDB_DIR": str(config.run_dir),
        "WANDB_RESUME": "allow",
    }
    os.environ["TMPDIR"] = defaults["VLLM_RPC_BASE_PATH"] = str(folder)
    with suppress(OSError):
        defaults["WANDB_RUN_ID"] = (Path(config.run_dir) / WANDB_RUN_FILE).read_text().strip()
    if not has_wandb_key():
        defaults["WANDB_MODE"] = "offline"
    if not os.access(Path.home(), os.W_OK):  # below it libraries keep things
        (home := folder / "home").mkdir(exist_ok=True)
        os.environ["HOME"] = str(home)
        defaults |= {"XDG_CACHE_HOME": str(home / ".cache"), "XDG_CONFIG_HOME": str(home / ".config")}
    if config.trainer.device == "cpu":
        defaults |= cpu_variables(config)
        if not os.environ.get("RAY_ADDRESS"):
            # Ray would keep its token in HOME; this run's own reaches all its processes, forked early ones too.
            defaults |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray refuses num_gpus=1 when it is set and empty
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
