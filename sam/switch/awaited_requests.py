"""The requests that are about to take an engine's free slots, as far as whoever sends them has told."""

# Steps with a free slot after which no request is thought to be on its way. On a CPU the way to the router and back
# took 5 to 9 ms (7aeeb4c:docs/experiments/routing_bench.md), a few steps of the tiny model.
PATIENCE_STEPS = 16


class AwaitedRequests:
    """Counts them from what the last request to come said of those behind it.

    What it said is true while slots are full. Once one is free it is believed for PATIENCE_STEPS steps: then those that
    waited have gone elsewhere, or whoever held them is gone.

    Args:
        slots: requests that run in the engine at most (vLLM's max_num_seqs).
    """

    def __init__(self, slots: int):
        self._slots, self._waiting, self._patience = slots, 0, PATIENCE_STEPS

    def tell(self, waiting: int) -> None:
        """A request has come; `waiting` requests were left where it came from."""
        self._waiting, self._patience = waiting, PATIENCE_STEPS

    def count(self, running: int, steps: int = 1) -> int:
        """Requests that are about to come; none where all slots are taken.

        Args:
            running: requests in the batch.
            steps: engine steps since the last call, this one included.
        """
        free = max(0, self._slots - running)
        if not free or not self._waiting:
            self._patience = PATIENCE_STEPS
            return 0
        if self._patience < steps:
            self._waiting = 0
        self._patience -= steps
        return min(free, self._waiting)
