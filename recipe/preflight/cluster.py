"""The Ray cluster that a run would join: whether this node is its head, its devices, and what each node lacks."""

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.preflight import machine
from recipe.preflight.problem import Problem, first_line

RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
NodeProblems = Callable[[dict], list[Problem]]  # from a config's content
ANSWER_SECONDS = 180.0  # a node imports Ray, reads the headers of all shards from the shared file system
CONNECT_SECONDS = 5.0  # a head that takes longer to accept a connection is not there
RESTART = "start the cluster again with scripts/start_ray_cluster.sh, or unset RAY_ADDRESS"
START = "bash scripts/start_ray_cluster.sh head here, worker HEAD_ADDRESS on the other nodes"


def start_problems(config: DictConfig) -> Iterator[Problem]:
    """Whether this node is the head of a Ray that runs; nothing is asked of a run that starts a Ray of its own."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        if config.trainer.nnodes > 1:
            running = cluster_of_this_node()
            remedy = f"use the script in scripts/, or export RAY_ADDRESS={running}" if running else START
            yield Problem("ray.head", f"RAY_ADDRESS is not set, trainer.nnodes={config.trainer.nnodes}", remedy)
        return
    if address == "auto":
        # Ray then looks for its own processes, which only the cluster's nodes have.
        address = _noted_address() or address
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        yield Problem(
            "ray.head", f"RAY_ADDRESS={address}, expected HOST:PORT, such as 10.0.0.1:6379", "set or unset it"
        )
    elif not machine.is_free(0, host.strip("[]")):
        yield Problem("ray.head", f"RAY_ADDRESS={address}, {platform.node()}", f"start the run on {host}")
    elif not answers(host, int(port)):
        yield Problem("ray.head", f"RAY_ADDRESS={address}: nothing answers there", START)


def cluster_of_this_node() -> str | None:
    """HOST:PORT of the cluster that `ray start` made this node join, if its head answers."""
    host, _, port = (address := _noted_address()).rpartition(":")
    return address if host and port.isdigit() and answers(host, int(port)) else None


def _noted_address() -> str:
    """What `ray start` writes down on every node; `ray stop` removes it."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    return ""


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), port), CONNECT_SECONDS):
        return True
    return False


def find_problems(config: DictConfig, node_problems: NodeProblems) -> Iterator[Problem]:
    """With RAY_ADDRESS set: whether the cluster has the devices, free and on as many nodes, and every node the rest.

    `node_problems` runs on each node.
    """
    if not (address := os.environ.get("RAY_ADDRESS")):
        return
    # As scripts/ascend_environment.sh has it; Ray 2.60 takes an old token in ~/.ray otherwise.
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        yield Problem("ray.head", f"RAY_ADDRESS={address}: {first_line(error)}", RESTART)
        return
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield from device_problems(config, alive, ray.available_resources())
        found = ask_nodes(config, alive, node_problems)
        for problem in dict.fromkeys(problem for problems in found.values() for problem in problems):
            places = [address for address, problems in found.items() if problem in problems]
            where = "every node" if len(places) == len(found) > 1 else ", ".join(places)
            yield Problem(problem.code, f"on {where}: {problem.value}", problem.remedy)
    finally:
        ray.shutdown()


def device_problems(config: DictConfig, nodes: list[dict], available: dict[str, float]) -> Iterator[Problem]:
    resource = RESOURCES[config.trainer.device]
    wanted, whole = config.trainer.nnodes, config.trainer.n_gpus_per_node
    counts = [node["Resources"].get(resource, 0) for node in nodes]
    free = int(available.get(resource, 0))
    if (complete := sum(count >= whole for count in counts)) < wanted:
        there = sorted(map(int, counts), reverse=True)
        yield Problem("ray.devices", f"{complete} of {wanted} nodes with {whole} {resource}, found {there}")
    elif free < wanted * whole:
        yield Problem(
            "ray.devices", f"{free} of {wanted * whole} {resource} are free", "wait for the other run or stop it"
        )


def ask_nodes(config: DictConfig, nodes: list[dict], node_problems: NodeProblems) -> dict[str, list[Problem]]:
    """Each node's own problems, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(node_problems)
    content, answers, found = OmegaConf.to_container(config), {}, {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers[node["NodeManagerAddress"]] = ask.options(scheduling_strategy=there).remote(content)
    for address, answer in answers.items():
        try:
            found[address] = ray.get(answer, timeout=ANSWER_SECONDS)
        except Exception as error:
            found[address] = [Problem("ray.node", str(error).strip().splitlines()[-1])]
    return found
