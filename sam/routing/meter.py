"""What a router's decisions came to, between two looks at it."""

from sam.routing.policy import SOURCES, ContextPolicy, Placement

COUNTS = ("admissions", "moves", "prefill_tokens", "held_by_kv")


class Meter:
    """Integrates over the seconds in which requests run or wait. Told after every event and decision of a policy."""

    def __init__(self, policy: ContextPolicy):
        self._policy = policy
        self._started: set[str] = set()  # requests that have started and are not gone
        self._counted = dict(policy.counters)
        self._at = 0.0
        self._busy = self._slots = self._waited = 0
        self._begin()

    def _begin(self) -> None:
        self._most_waiting = self._policy.waiting
        self._idle_seconds = self._slot_seconds = 0.0
        self._last_start: float | None = None
        self._last_end: float | None = None

    def event(self, now: float, name: str, request: str) -> None:
        """An event has happened at `now`, in seconds; `request` is its first argument."""
        self._advance(now)
        if name in ("finish", "abort"):
            self._started.discard(request)
            self._last_end = now
        self._most_waiting = max(self._most_waiting, self._policy.waiting)
        self._look()

    def decided(self, now: float, placements: list[Placement]) -> None:
        """Requests have started at `now`."""
        self._advance(now)
        new = {placement.request for placement in placements} - self._started
        if new:
            self._started |= new
            self._last_start = now
        self._look()

    def take(self, now: float) -> dict[str, float]:
        """Figures since the last call.

        Returns:
            admissions, moves, prefill_tokens, held_by_kv: as ContextPolicy.counters.
            waiting_max: most requests that waited.
            estimate_error: mean tokens between a response and what was expected of it; 0 without estimates.
            estimates_*, estimate_error_*: responses with an estimate from each of SOURCES, and their mean error.
            idle_slot_share: share of the slots' seconds, while requests ran or waited, in which none ran there.
            last_start_to_end_seconds: from when the last request began to when the last one ended.
        """
        self._advance(now)
        counters, before = self._policy.counters, self._counted
        grown = {name: float(counters[name] - before[name]) for name in counters}
        estimates = {source: grown[f"estimates_{source}"] for source in SOURCES}
        errors = {source: grown[f"estimate_error_{source}"] for source in SOURCES}
        known = self._last_start is not None and self._last_end is not None
        values = {
            **{name: grown[name] for name in COUNTS},
            "waiting_max": float(self._most_waiting),
            "estimate_error": sum(errors.values()) / max(1.0, sum(estimates.values())),
            **{f"estimates_{source}": estimates[source] for source in SOURCES},
            **{f"estimate_error_{source}": errors[source] / max(1.0, estimates[source]) for source in SOURCES},
            "idle_slot_share": self._idle_seconds / self._slot_seconds if self._slot_seconds else 0.0,
            "last_start_to_end_seconds": max(0.0, self._last_end - self._last_start) if known else 0.0,
        }
        self._counted = dict(counters)
        self._begin()
        return values

    def _advance(self, now: float) -> None:
        if self._busy or self._waited:
            self._slot_seconds += (now - self._at) * self._slots
            self._idle_seconds += (now - self._at) * (self._slots - self._busy)
        self._at = now

    def _look(self) -> None:
        self._busy, self._slots = self._policy.slots()
        self._waited = self._policy.waiting
