"""Rounds of loads in which the variants take turns, kept in a file as they are measured."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sam.bench.engine_process import EngineError, EngineProcess, stop_all
from sam.bench.environment import environment_of
from sam.bench.loads import WARM_UP, batches_of
from sam.bench.prompts import Group
from sam.bench.settings import Settings
from sam.reading import ReadError, expect, json_rows
from sam.record.atomic import replacing

# A worker process of vLLM's goes on polling for a second after its last step, and would take a core from the next.
REST_SECONDS = 1.5


class RoundsFile:
    """rounds.jsonl: the settings, then a line for each load of each round; of a load measured again the last one holds.

    Attributes:
        lines: by round and number of the load: `round`, `load`, `requests`, and `runs` by variant.

    Raises:
        ValueError: the file is there and `resume` is not set, or it is of other settings.
    """

    def __init__(self, path: Path, settings: Settings, resume: bool):
        self._path, self._settings = path, settings
        self.lines: dict[tuple[int, int], dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        if resume and content:
            self._load(content)
        elif content.count(b"\n") > 1:
            raise ValueError(f"{path} is there already: go on with --resume, or name another --output")
        else:
            path.write_text(json.dumps({"settings": asdict(settings)}) + "\n")

    def append(self, round_: int, load: int, runs: dict[str, dict[str, Any]]) -> None:
        """Keep what was measured of a load in a round, on disk at once."""
        line = {"round": round_, "load": load, "requests": self._settings.requests[load], "runs": runs}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines[round_, load] = line

    def missing(self, rounds: int, variants: list[str]) -> list[tuple[int, int]]:
        """Rounds, from 1, and numbers of the loads that lack one of the variants, in their order."""
        places = [(round_, load) for round_ in range(1, rounds + 1) for load in range(len(self._settings.requests))]
        return [place for place in places if not {*variants} <= self.lines.get(place, {"runs": {}})["runs"].keys()]

    def _load(self, content: bytes) -> None:
        def read(row: dict[str, Any], place: str) -> dict[str, Any]:
            names = ("round", "load", "requests", "runs") if rows else ("settings",)
            is_ours = row.keys() >= {*names} and isinstance(row[names[-1]], dict)
            expect(is_ours, place, f"a row of sam.bench with {', '.join(names)}", sorted(row))
            rows.append(row)
            return row

        rows: list[dict[str, Any]] = []
        for _ in json_rows(self._path, read, is_growing=True):
            pass
        if not rows:
            raise ReadError(f"{self._path}: not rounds of sam.bench: name another --output")
        if difference := self._settings.difference(rows[0]["settings"]):
            raise ReadError(f"{self._path}: {difference}: use the same settings, or name another --output")
        self.lines = {(row["round"], row["load"]): row for row in rows[1:]}
        if not content.endswith(b"\n"):  # a line that was being written when the machine stopped is left out
            with replacing(self._path) as partial:
                partial.write_text("".join(json.dumps(row) + "\n" for row in rows))


def turns(variants: list[str], round_: int) -> list[str]:
    """The order of a round: each variant comes first in turn, so that no place in the round favours one.

    Example:
        >>> turns(["stock", "off", "sam"], 2)
        ['off', 'sam', 'stock']
    """
    first = (round_ - 1) % len(variants)
    return variants[first:] + variants[:first]


class Engines:
    """The variants' engines. One that refuses or dies is left out and the others go on, unless it is the reference.

    Attributes:
        faults: by variant, what was wrong, in one line.
    """

    def __init__(self, settings: Settings, groups: list[Group], logs: Path, advance: Callable[[str], None]):
        """`advance` is called after each start and run with what that was, in words."""
        self._settings, self._groups, self._logs, self._advance = settings, groups, logs, advance
        self._engines: dict[str, EngineProcess] = {}
        self._rest = 0.0
        self.faults: dict[str, str] = {}

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_) -> None:
        """Leave none running, however this ends."""
        stop_all(self._engines.values())

    @property
    def variants(self) -> list[str]:
        """Those that are up."""
        return list(self._engines)

    def start(self) -> None:
        """Start one after the other, or side by side where the settings allow it.

        Raises:
            EngineError: the reference refused or ended. ValueError: the prompts are too long for one.
        """
        variants, has_workers = self._settings.variants, False
        for together in [variants] if self._settings.starts_at_once else [[one] for one in variants]:
            for variant in together:
                engine = EngineProcess(variant, self._logs / f"{variant}.log", environment_of(variant))
                self._engines[variant] = engine
                engine.tell(self._settings.start(variant))
            for variant in together:
                if (started := self._reply(variant)) is not None:
                    check_length(self._groups, self._settings.max_tokens, started["longest_text"])
                    has_workers |= started["has_workers"]
                self._advance(f"{variant} started")
        # With two cores an engine there is always one left for the next.
        self._rest = REST_SECONDS if has_workers and (os.cpu_count() or 1) < 2 * len(self._engines) else 0.0

    def measure(self, file: RoundsFile, rounds: int) -> None:
        """Measure what is missing of `rounds` rounds; each variant runs each load once before, uncounted.

        Raises:
            EngineError: the reference refused or ended.
        """
        places = file.missing(rounds, self.variants)
        for load in sorted({load for _, load in places}):
            for _ in self._runs(self._settings.variants, WARM_UP, load):
                self._advance("warm-up")
        for round_, load in places:
            runs = {}
            for variant, run in self._runs(turns(self._settings.variants, round_), round_, load):
                runs |= {variant: run} if run is not None else {}
                self._advance(f"round {round_}, {self._settings.requests[load]} requests")
            file.append(round_, load, runs)

    def _runs(self, variants: list[str], round_: int, load: int) -> Iterator[tuple[str, dict[str, Any] | None]]:
        command = {"batches": batches_of(self._settings, round_, load, self._groups)}
        command |= {"sampling": self._settings.sampling()}
        for variant in variants:
            if variant in self._engines:
                time.sleep(self._rest)
                self._engines[variant].tell(command)
                yield variant, self._reply(variant)

    def _reply(self, variant: str) -> dict[str, Any] | None:
        try:
            return self._engines[variant].reply()
        except EngineError as error:
            if variant == self._settings.reference:
                raise
            self.faults[variant] = str(error)
            self._engines.pop(variant).stop()
            return None


def check_length(groups: list[Group], max_tokens: int, longest_text: int) -> None:
    """Raise ValueError if a prompt with its response is longer than an engine takes, in tokens."""
    for number, (prompt, responses) in enumerate(groups, start=1):
        response = max_tokens if responses is None else max(map(len, responses))
        if len(prompt) + response > longest_text:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and a response of up to {response}, more than the "
                f"{longest_text} that the engine takes: set --max-tokens or --max-model-len"
            )
