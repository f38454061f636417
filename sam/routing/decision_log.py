"""A policy's events and decisions, written down as they come, and played again from what was written."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from sam.routing.meter import Meter
from sam.routing.policy import ContextPolicy, RoutingSettings


class DecisionLog:
    """Appends a JSON line for every event and decision of a policy to a file.

    A line is [seconds since the epoch, name, arguments ...]; the first is [.., "settings", {..}]. A decision is
    [.., "decide", requests left waiting, [[request, replica, tokens], ..]] and is written where something starts.

    Attributes:
        meter: counts what they come to.
    """

    def __init__(self, policy: ContextPolicy, path: Path):
        self.meter = Meter(policy)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._write(time.time(), "settings", asdict(policy.settings))
        policy.note = self._note

    def _note(self, *entry) -> None:
        now = time.time()
        self.meter.note(now, *entry)
        self._write(now, *entry)

    def _write(self, now: float, *entry) -> None:
        self._file.write(json.dumps([round(now, 4), *entry], separators=(",", ":")) + "\n")


def replay(lines: Iterable[str]) -> int:
    """Play a log again; returns the number of starts, all of which were decided again.

    Raises:
        ValueError: a decision differs from the log's, by line number.
    """
    events, starts = {}, 0
    for number, line in enumerate(lines, start=1):
        _, name, *arguments = json.loads(line)
        if name == "settings":  # a run that was resumed begins again
            policy = ContextPolicy(RoutingSettings(**arguments[0]))
            told = (policy.add_replica, policy.remove_replica, policy.arrive, policy.proceed, policy.finish)
            events = {event.__name__: event for event in (*told, policy.abort)}
        elif name == "decide":
            found = [list(start) for start in policy.decide()]
            if found != arguments[1]:
                raise ValueError(f"line {number}: decided {found[:3]} ..., the log has {arguments[1][:3]} ...")
            starts += len(found)
        elif name in events:
            events[name](*arguments)
        else:
            raise ValueError(f"line {number}: {name!r} is no event: expected one of {', '.join(events)}")
    return starts
