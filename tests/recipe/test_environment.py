"""What a run's processes get as environment, and the CPU platform's part in resuming."""

import pytest
import torch

from recipe import environment


@pytest.fixture
def bare(monkeypatch):
    for name in (*environment.RAY_WORKERS, *environment.FORWARDED_SWITCHES, *environment.FORWARDED_IF_SET):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("user", [{}, {"NCCL_DEBUG": "INFO", "VLLM_BATCH_INVARIANT": "1", "PYTHONHASHSEED": "0"}])
def test_ray_gets_what_verl_gives_it(bare, user):
    constants = pytest.importorskip("verl.trainer.constants_ppo")
    for name, value in user.items():
        bare.setenv(name, value)
    ours = environment.ray_runtime_env()
    assert ours["env_vars"].pop("VLLM_USE_V2_MODEL_RUNNER") == "0"  # this recipe's own
    assert ours["env_vars"].pop("TRANSFER_QUEUE_ENABLE") == "1"  # which verl adds when it calls ray.init
    assert ours == constants.get_ppo_ray_runtime_env()


def test_users_variables_stay(bare, tmp_path):
    bare.setenv("HOME", str(tmp_path))
    bare.setenv("TMPDIR", "elsewhere")
    bare.setenv("OMP_NUM_THREADS", "7")
    bare.setenv("VERL_PLATFORM", "cpu")
    environment.prepare("cpu", tmp_path / "run", tmp_path)
    import os

    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["WANDB_MODE"] == "offline"


def test_home_that_cannot_be_written_is_replaced(bare, tmp_path):
    import os

    bare.setenv("HOME", str(tmp_path / "missing"))
    bare.setenv("TMPDIR", "elsewhere")
    environment.prepare("cpu", tmp_path / "run", tmp_path)
    assert os.access(os.environ["HOME"], os.W_OK)
    assert os.environ["XDG_CACHE_HOME"].startswith(os.environ["HOME"])


def test_platform_restores_a_checkpoints_random_state():
    """verl saves the state as the CPU's and restores it as the device's, too."""
    platform = pytest.importorskip("recipe.tiny.platform")
    state = torch.get_rng_state()
    first = torch.rand(3)
    platform.CpuPlatform.device_module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
