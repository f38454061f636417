"""What a router's decisions came to, between two looks at it."""

from sam.routing.policy import ContextPolicy

COUNTS = ("admissions", "moves", "prefill_tokens", "held_by_kv")


class Meter:
    """Integrates over the seconds in which requests run or wait. Told of every event and decision of a policy."""

    def __init__(self, policy: ContextPolicy):
        self._policy = policy
        self._started: set[str] = set()  # requests that have started and are not gone
        self._counted = dict(policy.counters)
        self._at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._most_waiting = self._policy.waiting
        self._idle_seconds = self._slot_seconds = 0.0
        self._last_start: float | None = None
        self._last_end: float | None = None

    def note(self, now: float, name: str, *arguments) -> None:
        """An event happens, or has been decided, at `now`, in seconds; the rest is as ContextPolicy.note has it."""
        self._advance(now)
        if name in ("finish", "abort"):
            self._started.discard(arguments[0])
            self._last_end = now
        elif name == "decide":
            requests = {start.request for start in arguments[1]}
            if not requests <= self._started:
                self._started |= requests
                self._last_start = now

    def take(self, now: float) -> dict[str, float]:
        """Figures since the last call.

        Returns:
            admissions, moves, prefill_tokens, held_by_kv: as ContextPolicy.counters.
            waiting_max: most requests that waited.
            estimate_error: mean tokens between a response and what was expected of it; 0 without estimates.
            idle_slot_share: share of the slots' seconds, while requests ran or waited, in which none ran there.
            last_start_to_end_seconds: from when the last request began to when the last one ended.
        """
        self._advance(now)
        counters = self._policy.counters
        grown = {name: float(counters[name] - before) for name, before in self._counted.items()}
        known = self._last_start is not None and self._last_end is not None
        values = {
            **{name: grown[name] for name in COUNTS},
            "waiting_max": float(self._most_waiting),
            "estimate_error": grown["estimate_error"] / max(1.0, grown["estimates"]),
            "idle_slot_share": self._idle_seconds / self._slot_seconds if self._slot_seconds else 0.0,
            "last_start_to_end_seconds": max(0.0, self._last_end - self._last_start) if known else 0.0,
        }
        self._counted = dict(counters)
        self._begin()
        return values

    def _advance(self, now: float) -> None:
        """Count the seconds since the last event, in which everything was as it is."""
        (busy, slots), waiting = self._policy.slots(), self._policy.waiting
        if busy or waiting:
            self._slot_seconds += (now - self._at) * slots
            self._idle_seconds += (now - self._at) * (slots - busy)
        self._most_waiting = max(self._most_waiting, waiting)
        self._at = now
