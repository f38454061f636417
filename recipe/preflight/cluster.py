"""The Ray cluster that a run would join: its nodes and devices, and what each node lacks, asked on the node itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
# Of checks.checks: what may differ from node to node.
NODE_SUBJECTS = (
    "versions",
    "Ascend: pairing and patches",
    "variables",
    "data and model",
    "memory, disk and ports of this machine",
)
ANSWER_SECONDS = 180.0  # a node imports Ray, reads the headers of all shards from the shared file system


def find_problems(config: DictConfig) -> Iterator[str]:
    """With RAY_ADDRESS set: whether the cluster has the devices, free and on as many nodes, and every node the rest."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        return
    # As scripts/ascend_environment.sh has it; Ray 2.60 takes an old token in ~/.ray otherwise.
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        yield (
            f"RAY_ADDRESS={address}: no cluster answers ({str(error).splitlines()[0]}): start it "
            "with bash scripts/start_ray_cluster.sh, or unset RAY_ADDRESS"
        )
        return
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield from _device_problems(config, alive, ray.available_resources())
        yield from _by_problem(ask_nodes(config, alive))
    finally:
        ray.shutdown()


def _device_problems(config: DictConfig, nodes: list[dict], available: dict[str, float]) -> Iterator[str]:
    resource = RESOURCES[config.trainer.device]
    wanted, whole = config.trainer.nnodes, config.trainer.n_gpus_per_node
    counts = [node["Resources"].get(resource, 0) for node in nodes]
    free = int(available.get(resource, 0))
    if (complete := sum(count >= whole for count in counts)) < wanted:
        yield (
            f"{complete} of {wanted} nodes are in the Ray cluster with {whole} {resource} each (found: "
            f"{sorted(map(int, counts), reverse=True)}): start the others with scripts/start_ray_cluster.sh worker"
        )
    elif free < wanted * whole:
        yield (
            f"{free} of the {wanted * whole} {resource} that the run needs are free: another run holds the others, "
            "wait for it or stop it"
        )


def ask_nodes(config: DictConfig, nodes: list[dict]) -> dict[str, list[str]]:
    """Each node's own problems, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(node_problems)
    content = OmegaConf.to_container(config)
    answers = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(content)
        for node in nodes
    }
    found = {}
    for address, answer in answers.items():
        try:
            found[address] = ray.get(answer, timeout=ANSWER_SECONDS)
        except Exception as error:
            found[address] = [
                f"preflight cannot run there ({str(error).strip().splitlines()[-1]}): pip install --no-deps -e . and "
                "the pins of requirements/ on that node"
            ]
    return found


def node_problems(content: dict) -> list[str]:
    """Runs on the node, in the environment that `ray start` gave its Ray."""
    from recipe.preflight.checks import checks

    os.environ.setdefault("RAY_ADDRESS", "auto")  # Ray runs here: its ports and memory are taken by itself
    subjects = checks(OmegaConf.create(content))
    return [problem for name in NODE_SUBJECTS for problem in subjects[name]]


def _by_problem(found: dict[str, list[str]]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for address, problems in found.items():
        for problem in problems:
            places.setdefault(problem, []).append(address)
    for problem, addresses in places.items():
        where = "every node" if len(addresses) == len(found) > 1 else ", ".join(addresses)
        yield f"on {where}: {problem}"
