"""Routing: the replica of each request, and the samples that its drafter sees there."""

import numpy as np

ROUTINGS = ("least-loaded", "prompt", "shared")


def assign(prompts: np.ndarray, replicas: int, routing: str, seed: int = 0) -> np.ndarray:
    """Route the requests of a round, which arrive together.

    least-loaded: the replica with the fewest requests, a random one of them if there are several, as verl 0.9.1's
        GlobalRequestLoadBalancer does it.
    prompt: all samples of a prompt on one replica, the one with the fewest requests when the first sample comes.
    shared: as least-loaded; what is shared is drafting context (`siblings`).

    Args:
        prompts: int64 [requests], number of each one's prompt.

    Returns:
        int64 [requests].
    """
    rng = np.random.default_rng(seed)
    load = np.zeros(replicas, dtype=np.int64)
    home: dict[int, int] = {}
    replica_of = np.empty(len(prompts), dtype=np.int64)
    for i, prompt in enumerate(prompts.tolist()):
        if routing != "prompt" or prompt not in home:
            home[prompt] = int(rng.choice(np.flatnonzero(load == load.min())))
        replica_of[i] = home[prompt]
        load[home[prompt]] += 1
    return replica_of


def siblings(prompts: np.ndarray, replica_of: np.ndarray, routing: str, scope: str) -> np.ndarray:
    """Count the samples of its prompt, itself included, that each request's drafter sees.

    Returns:
        int64 [requests].
    """
    if scope == "request":
        return np.ones(len(prompts), dtype=np.int64)
    places = prompts if routing == "shared" else prompts * (int(replica_of.max(initial=0)) + 1) + replica_of
    _, place, count = np.unique(places, return_inverse=True, return_counts=True)
    return count[place]
