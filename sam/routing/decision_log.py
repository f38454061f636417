"""A policy whose events and decisions are written down, and played again from what was written."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from sam.routing.meter import Meter
from sam.routing.policy import ContextPolicy, Placement, RoutingSettings

EVENTS = ("add_replica", "remove_replica", "arrive", "proceed", "finish", "abort")


class LoggedPolicy:
    """A ContextPolicy that appends a JSON line for every event and decision to a file.

    `meter` counts what they come to. A line is [seconds since the epoch, name, arguments ...]; the first is
    [.., "settings", {..}]. A decision is [.., "decide", settled, [[request, replica, tokens], ..]] and is written where
    something starts.
    """

    def __init__(self, settings: RoutingSettings, path: Path):
        self.policy = ContextPolicy(settings)
        self.meter = Meter(self.policy)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._write("settings", asdict(settings))

    def event(self, name: str, *arguments) -> object:
        """Tell the policy of an event: one of EVENTS with the arguments of its method."""
        result = getattr(self.policy, name)(*arguments)
        self.meter.event(self._write(name, *arguments), name, arguments[0])
        return result

    def decide(self, settled: bool) -> list[Placement]:
        """The policy's decisions."""
        if placements := self.policy.decide(settled):
            self.meter.decided(self._write("decide", settled, placements), placements)
        self._file.flush()
        return placements

    def take_metrics(self) -> dict[str, float]:
        """Meter.take of what has happened since the last call."""
        return self.meter.take(time.time())

    def _write(self, *entry) -> float:
        now = time.time()
        self._file.write(json.dumps([round(now, 4), *entry], separators=(",", ":")) + "\n")
        return now


def replay(lines: Iterable[str]) -> int:
    """Play a log again; returns the number of placements, all of which were decided again.

    Raises:
        ValueError: a decision differs from the log's, by line number.
    """
    policy, placements = ContextPolicy(RoutingSettings()), 0
    for number, line in enumerate(lines, start=1):
        _, name, *arguments = json.loads(line)
        if name == "settings":  # a run that was resumed begins again
            policy = ContextPolicy(RoutingSettings(**arguments[0]))
        elif name == "decide":
            settled, expected = arguments
            found = [list(placement) for placement in policy.decide(settled)]
            if found != expected:
                raise ValueError(f"line {number}: decided {found[:3]} ..., the log has {expected[:3]} ...")
            placements += len(found)
        elif name in EVENTS:
            getattr(policy, name)(*arguments)
        else:
            raise ValueError(f"line {number}: {name!r} is no event: expected one of {', '.join(EVENTS)}")
    return placements
