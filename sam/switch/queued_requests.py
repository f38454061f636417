"""The requests that are about to take an engine's free slots, as far as their sender has told."""

# Steps with a free slot after which no request is thought to be on its way. On a CPU the way to the router and back
# took 5 to 9 ms (7aeeb4c:docs/experiments/routing_bench.md), a few steps of the tiny model.
PATIENCE_STEPS = 16


class QueuedRequests:
    """Requests that wait in a router, as the last request that came from there said.

    What it said holds while slots are full. Once one is free it holds for PATIENCE_STEPS steps: then those that waited
    have gone elsewhere, or the router is gone.

    Args:
        slots: requests that run in the engine at most (vLLM's max_num_seqs).
    """

    def __init__(self, slots: int):
        self._slots, self._queued, self._patience = slots, 0, PATIENCE_STEPS

    def update(self, queued: int) -> None:
        """Take from a request that has come how many are left in the queue that it comes from."""
        self._queued, self._patience = queued, PATIENCE_STEPS

    def expected(self, running: int, steps: int = 1) -> int:
        """Return how many requests are about to come; 0 where all slots are taken.

        Args:
            running: requests in the batch.
            steps: engine steps since the last call, this one included.
        """
        free = max(0, self._slots - running)
        if not free or not self._queued:
            self._patience = PATIENCE_STEPS
            return 0
        if self._patience < steps:
            self._queued = 0
        self._patience -= steps
        return min(free, self._queued)
