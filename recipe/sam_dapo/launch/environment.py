"""Environment variables that verl, vLLM and Ray read, set once in one place before any of them is imported.

Ray's workers and vLLM's engine processes inherit them. A variable the user has set stays as it is.
"""

import os
import secrets
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
# How long Ray's processes wait for each other at their start, by default 5 to 60 s (start_ray of
# recipe.sam_dapo.trainer).
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
CPU = HUGE_PAGES | {
    "VERL_PLATFORM": "cpu",  # of recipe.sam_dapo.tiny.platform
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engines for cuda and npu only
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 32 k tokens of the tiny model need 0.2
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM binds its threads to cores, and then two runs share one core
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled unless the config says so (cpu_variables)
    "OMP_NUM_THREADS": "1",
    # Waiting threads look around for some 20 us, then leave the cores to the other processes. They would sleep at once
    # with OMP_WAIT_POLICY=PASSIVE, which makes forward passes of two threads twice as long, or block them for long.
    "GOMP_SPINCOUNT": "20000",
    # Lets vLLM's engine process run the model itself (distributed_executor_backend=uni); a worker process of its own
    # would cost 20 s of imports and milliseconds in every step. The engine still has its own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TQ_NUM_THREADS": "1",  # of TransferQueue's tensor copies
    "RAY_COLOR_PREFIX": "0",  # in a log file
}
# Of what verl gives every Ray process, all that a CPU needs: importing it (verl.trainer.constants_ppo) imports all of
# verl, which the driver of a CPU's run can do without.
CPU_WORKERS = {"TOKENIZERS_PARALLELISM": "true", "VLLM_LOGGING_LEVEL": "WARN", "VLLM_DISABLE_COMPILE_CACHE": "1"}
# What a Ray that runs already does not inherit from here: OFFLINE, and wandb's, which verl calls in an actor.
# Not its key: a runtime_env can be read in Ray's dashboard and logs.
FORWARDED = (
    *OFFLINE,
    "VLLM_USE_V2_MODEL_RUNNER",
    "WANDB_BASE_URL",
    "WANDB_DIR",
    "WANDB_ENTITY",
    "WANDB_JOB_TYPE",
    "WANDB_MODE",
    "WANDB_RESUME",
    "WANDB_RUN_GROUP",
    "WANDB_RUN_ID",
    "WANDB_TAGS",
)


def ray_runtime_env(config: DictConfig) -> dict:
    """Ray's `runtime_env` of a run, after `prepare`: verl's variables for all its processes, wandb's, and a CPU's."""
    names = list(FORWARDED)
    if config.trainer.device == "cpu":
        names += CPU
        verls = {name: value for name, value in CPU_WORKERS.items() if name not in os.environ}
    else:
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        verls = get_ppo_ray_runtime_env(config)["env_vars"]
    forwarded = {name: os.environ[name] for name in names if name in os.environ}
    return {"env_vars": {**verls, **forwarded, "TRANSFER_QUEUE_ENABLE": "1"}, "working_dir": None}


def has_wandb_key() -> bool:
    """Whether wandb would find a key without asking: in WANDB_API_KEY, or where `wandb login` leaves it."""
    login = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    text = login.read_text() if login.is_file() else ""
    # wandb 0.31 logs in to forge.coreweave.com, earlier ones to wandb.ai; an own server is named by WANDB_BASE_URL.
    hosts = ["wandb", "coreweave.com", urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc]
    return bool(os.environ.get("WANDB_API_KEY")) or any(host and host in text for host in hosts)


def cpu_variables(config: DictConfig) -> dict[str, str]:
    """CPU, with the threads of `machine.threads`, and with compiled engines where rollout.enforce_eager is off."""
    threads = config.machine.threads or len(os.sched_getaffinity(0))
    variables = CPU | {"OMP_NUM_THREADS": str(threads)}
    if not config.actor_rollout_ref.rollout.enforce_eager:
        del variables["TORCHDYNAMO_DISABLE"]
    return variables


def prepare(config: DictConfig, folder: Path) -> None:
    """Set the variables for a run; its private `folder` is for sockets, locks, compiled kernels."""
    defaults = OFFLINE | PATIENT
    # verl passes wandb.init a project and a name only; the rest wandb reads from its environment, such as the run that
    # it goes on with. Runs of one config and seed are shown together, each with its drafter.
    defaults |= {
        "WANDB_RUN_GROUP": f"{config.config_name}_seed{config.seed}",
        "WANDB_JOB_TYPE": config.speculation.method,
        "WANDB_DIR": str(config.run_dir),
        "WANDB_RESUME": "auto",
    }
    os.environ["TMPDIR"] = str(folder)
    defaults["VLLM_RPC_BASE_PATH"] = str(folder)
    if not has_wandb_key():
        defaults["WANDB_MODE"] = "offline"
    if not os.access(Path.home(), os.W_OK):  # below it libraries keep things
        home = folder / "home"
        home.mkdir(exist_ok=True)
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
