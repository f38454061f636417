"""verl's V1 task runner with the recipe's trainer in it."""

from __future__ import annotations

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

# verl exports the class only in its Ray wrapping.
_TaskRunnerV1 = TaskRunnerV1.__ray_metadata__.modified_class


@ray.remote
class TaskRunner(_TaskRunnerV1):
    def run(self, config: DictConfig):
        """verl looks trainers up by `trainer_mode`; "sync" must keep its name, since verl compares it elsewhere."""
        if config.trainer.device == "cpu":
            from recipe.tiny.platform import check_installed

            check_installed()
        from verl.trainer.ppo.v1 import trainer_base

        from recipe.trainer import DapoTrainer

        trainer_base.TRAINER_REGISTRY["sync"] = DapoTrainer
        super().run(config)


def run_ppo_checked(config: DictConfig, task_runner) -> None:
    """verl's own validation, then verl's run. Resolved here, so that every actor sees the same values."""
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, task_runner_class=task_runner)
