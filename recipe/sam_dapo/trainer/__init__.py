"""The run in Ray: verl's V1 task runner with the recipe's trainer in it.

verl is imported in the actor only: in the driver it would cost every start a quarter of a minute for nothing.
"""

import os
import re
import secrets
import sys
import threading
import time
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import fork_server
from recipe.sam_dapo.launch.screen import is_death
from recipe.sam_dapo.rollout import SESSION
from sam.patching import put

# What the processes of a run import, for the fork server.
IMPORTED_ONCE = [
    "verl.trainer.main_ppo",
    "recipe.sam_dapo.trainer.dapo_trainer",
    "recipe.sam_dapo.rollout.server",
    "recipe.sam_dapo.rollout.agent_loop",
    "recipe.sam_dapo.rollout.router",
    "recipe.sam_dapo.trainer.reward",
    "vllm.v1.engine.core",
]
# At which training workers meet: above those of `ray start` for its workers (10002 to 19999), below those that Linux
# gives out by itself.
FIRST_PORT = 20000
LAST_PORT = 32768
ROOM = 100  # ports that verl may try after the first
SLOW_START = "timed out during startup"  # Ray waits 15 s for two Python processes of its own, which cannot be set
STARTS = 4
# Arguments that only a Ray started by this process takes.
OWN_RAY_ONLY = ("num_cpus", "num_gpus", "resources", "include_dashboard", "_temp_dir", "object_store_memory")
LOST_LINK = re.compile("[Cc]onnection (closed|reset|refused)|[Tt]imed out")  # what ranks say whose peer has gone
NOTICE_SECONDS = 30.0  # Ray gives up a node after 5 questions without an answer, 3 s apart
LOOK_SECONDS = 5.0  # at the nodes, while the run goes on


class NodeLostError(RuntimeError):
    """A run that has lost a node of its cluster."""


class TaskRunner:
    """The driver's counterpart in the cluster, an actor as in verl's main_ppo."""

    def run(self, config: DictConfig) -> None:
        """Train, if verl and vLLM take the config. Raises ConfigError, or what verl raises."""
        import transfer_queue

        # Its actors start while verl is imported here; verl's own call then finds them.
        queue = threading.Thread(target=transfer_queue.init, args=(config.transfer_queue,))
        queue.start()
        from verl.single_controller.ray import RayWorkerGroup
        from verl.trainer.main_ppo import TaskRunnerV1
        from verl.trainer.ppo.v1 import trainer_base

        from recipe.sam_dapo import verl_plugin
        from recipe.sam_dapo.preflight import vllm_command
        from recipe.sam_dapo.rollout import server  # noqa: F401 - the servers' class, needed later: imported while nothing waits
        from recipe.sam_dapo.trainer import dapo_trainer

        if config.trainer.device == "cpu":
            from recipe.sam_dapo.tiny.platform import check_installed

            check_installed()
        OmegaConf.resolve(config)
        vllm_command.check(config)
        # verl looks trainers up by `trainer_mode`; "sync" must keep its name, since verl compares it elsewhere.
        verl_plugin.join_verl(trainer_base.PPOTrainer)
        trainer_base.TRAINER_REGISTRY["sync"] = dapo_trainer.DapoTrainer
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - ROOM - FIRST_PORT)
        group = partial(RayWorkerGroup, master_port_range=[port, port + ROOM])
        put(trainer_base, "RayWorkerGroup", "meet_at_own_port", group)
        queue.join()
        try:
            # verl exports the class only in its Ray wrapping.
            TaskRunnerV1.__ray_metadata__.modified_class().run(config)
        finally:
            if "wandb" in sys.modules:  # at exit it would look for its service, which Ray has ended by then
                sys.modules["wandb"].teardown()


def ray_arguments(config: DictConfig, temporary: str) -> dict:
    """Arguments of ray.init: for a Ray of its own below `temporary`, or for the cluster that RAY_ADDRESS names."""
    arguments = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if os.environ.get("RAY_ADDRESS"):
        return {name: value for name, value in arguments.items() if name not in OWN_RAY_ONLY}
    return {**arguments, "_temp_dir": temporary}


def start_ray(**arguments) -> None:
    """ray.init, up to STARTS times where Ray's own processes are slower than it waits: a busy machine's."""
    import ray

    for left in reversed(range(STARTS)):
        try:
            return ray.init(**arguments)
        except Exception as error:  # Ray raises no subclass here
            if SLOW_START not in str(error) or not left:
                raise


def run_in_ray(config: DictConfig, runtime_env: dict, temporary: str) -> None:
    """Train in Ray, connected to as the config and RAY_ADDRESS say, or started here; on a CPU its processes are forked
    from one that has imported IMPORTED_ONCE."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    arguments = ray_arguments(config, temporary)
    users = arguments.pop("runtime_env", None) or {}
    users = {key: value for key, value in users.items() if value is not None}
    env_vars = {
        **runtime_env["env_vars"],
        **(users.get("env_vars") or {}),
        SESSION: f"-{Path(temporary).parent.name}",
    }
    runtime_env = {**runtime_env, **users, "env_vars": env_vars}
    if config.trainer.device == "cpu" and not os.environ.get("RAY_ADDRESS"):
        python = fork_server.start(Path(temporary).parent, IMPORTED_ONCE, env_vars)
        env_vars[fork_server.EXECUTABLE] = str(python)
        runtime_env["py_executable"] = str(python)
    start_ray(**arguments, runtime_env=runtime_env)
    # On this node, where run_dir is for certain; Ray would take any.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    nodes = living_nodes()
    runner = ray.remote(TaskRunner).options(scheduling_strategy=here).remote()
    run = runner.run.remote(config)
    try:
        while len(nodes) > 1 and not ray.wait([run], timeout=LOOK_SECONDS)[0]:
            check_nodes(nodes, 0.0)  # verl may wait for ever for what was on one that is lost
        ray.get(run)
    except Exception as error:  # what a lost node looks like depends on who asked it
        if len(nodes) > 1 and (is_death(repr(error)) or LOST_LINK.search(str(error))):
            check_nodes(nodes, NOTICE_SECONDS)
        raise


def living_nodes() -> dict[str, str]:
    """The addresses of the cluster's nodes that Ray has not given up, by their id."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def check_nodes(nodes: dict[str, str], seconds: float) -> None:
    """Raise NodeLostError if one of them is lost, or is in so many seconds, which Ray may take to notice."""
    deadline = time.monotonic() + seconds
    while not (lost := nodes.keys() - living_nodes()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.5)
    addresses = ", ".join(sorted(nodes[node] for node in lost))
    raise NodeLostError(f"node {addresses} is lost: its Ray, its network or the machine itself has failed")
