"""What a run's processes get as environment."""

import os

import pytest
from omegaconf import OmegaConf

from sam_recipe.launch import environment


@pytest.fixture
def bare(monkeypatch):
    before = dict(os.environ)
    for name in (*environment.RAY_WORKERS, *environment.FORWARDED):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    os.environ.clear()  # what `prepare` has set
    os.environ.update(before)


def config(directory, method="sam", threads=1, eager=True):
    return OmegaConf.create(
        {"config_name": "dapo_tiny_cpu", "seed": 3, "run_dir": str(directory / "run"), "trainer": {"device": "cpu"},
         "speculation": {"method": method}, "machine": {"threads": threads},
         "actor_rollout_ref": {"rollout": {"enforce_eager": eager}}}
    )  # fmt: skip


@pytest.mark.parametrize("user", [{}, {"NCCL_DEBUG": "INFO", "VLLM_BATCH_INVARIANT": "1", "PYTHONHASHSEED": "0"}])
def test_ray_gets_what_verl_gives_it(bare, user):
    constants = pytest.importorskip("verl.trainer.constants_ppo")
    for name, value in user.items():
        bare.setenv(name, value)
    ours = environment.ray_runtime_env("npu")
    assert ours["env_vars"].pop("VLLM_USE_V2_MODEL_RUNNER") == "0"  # this recipe's own
    assert ours["env_vars"].pop("TRANSFER_QUEUE_ENABLE") == "1"  # which verl adds when it calls ray.init
    assert ours == constants.get_ppo_ray_runtime_env()


def test_threads_and_compilation_are_the_configs(tmp_path):
    tiny = environment.cpu_variables(config(tmp_path))
    assert (tiny["OMP_NUM_THREADS"], tiny["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    larger = environment.cpu_variables(config(tmp_path, threads=None, eager=False))
    assert int(larger["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0)) and "TORCHDYNAMO_DISABLE" not in larger


def test_wandbs_variables_reach_the_processes_of_a_ray_that_runs_already(bare, tmp_path):
    """With one group for runs that differ in speculation alone."""
    bare.setenv("HOME", str(tmp_path))
    bare.setenv("TMPDIR", "elsewhere")
    bare.setenv("WANDB_TAGS", "mine")
    bare.setenv("WANDB_API_KEY", "0" * 40)
    environment.prepare(config(tmp_path, method="off"), tmp_path)
    forwarded = environment.ray_runtime_env("cpu")["env_vars"]
    assert (forwarded["WANDB_RUN_GROUP"], forwarded["WANDB_JOB_TYPE"]) == ("dapo_tiny_cpu_seed3", "off")
    assert forwarded["WANDB_DIR"] == str(tmp_path / "run") and forwarded["WANDB_TAGS"] == "mine"
    assert "WANDB_API_KEY" not in forwarded and "WANDB_MODE" not in forwarded


@pytest.mark.parametrize(
    "machine, found", [("api.wandb.ai", True), ("api.forge.coreweave.com", True), ("x.org", False)]
)
def test_a_login_is_found(bare, tmp_path, machine, found):
    bare.delenv("WANDB_API_KEY", raising=False)
    bare.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(f"machine {machine} login user password {'0' * 40}\n")
    assert environment.has_wandb_key() == found
