"""Rounds of loads in which the variants take turns, kept in a file as they are measured."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sam.bench.engine_process import EngineProcess
from sam.bench.loads import WARM_UP, Group, batches_of, come_again, requests_of
from sam.bench.settings import Settings
from sam.bench.table import sum_of_replays
from sam.reading import ReadError, expect, json_rows, one_line
from sam.record.atomic import replacing

# A worker process of vLLM's goes on polling for a second after its last step, and would take a core from the next.
REST_SECONDS = 1.5
RECORDED_ROUND = 1


class RoundsFile:
    """rounds.jsonl: the settings, then a line for each load of each round; beside it recorded/LOAD-VARIANT.json, what
    happened step by step in the first round.

    Attributes:
        lines: `round`, `load` (its number), `requests`, and `runs` by variant.

    Raises:
        ValueError: the file is there and `resume` is not set, or it is of other settings.
    """

    def __init__(self, path: Path, settings: Settings, resume: bool):
        self._path = path
        self.lines: list[dict[str, Any]] = []
        content = path.read_bytes() if path.exists() else b""
        if resume and content:
            self._load(content, settings)
        elif content.count(b"\n") > 1:
            raise ValueError(f"{path} is there already: go on with --resume, or name another --output")
        else:
            path.write_text(json.dumps({"settings": asdict(settings)}) + "\n")

    def has(self, round_: int, load: int) -> bool:
        """Whether a load of a round is measured."""
        return any((line["round"], line["load"]) == (round_, load) for line in self.lines)

    def append(self, line: dict[str, Any]) -> None:
        """Keep a line, on disk at once."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)

    def record(self, requests: int, variant: str, recorded: list[dict[str, Any]]) -> None:
        """Keep what happened step by step in each batch at a load of `requests`."""
        path = self._recorded(requests, variant)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(recorded) + "\n")

    def recorded(self, requests: int, variant: str) -> list[dict[str, Any]] | None:
        """What `record` kept; None before it has."""
        path = self._recorded(requests, variant)
        if not path.is_file():
            return None
        with one_line(str(path), "not steps recorded by sam.bench"):
            return json.loads(path.read_bytes())

    def _recorded(self, requests: int, variant: str) -> Path:
        return self._path.parent / "recorded" / f"{requests}-{variant}.json"

    def _load(self, content: bytes, settings: Settings) -> None:
        def read(row: dict[str, Any], place: str) -> dict[str, Any]:
            names = ("round", "load", "requests", "runs") if heads else ("settings",)
            expect(row.keys() >= {*names}, place, f"a row of sam.bench with {', '.join(names)}", sorted(row))
            heads.append(place)
            return row

        heads: list[str] = []
        rows = list(json_rows(self._path, read, is_growing=True))
        if not rows:
            raise ReadError(f"{self._path}: not rounds of sam.bench: name another --output")
        first, *self.lines = rows
        with one_line(f"{self._path}, line 1", "settings of another version"):
            difference = settings.difference(first["settings"])
        if difference:
            raise ReadError(f"{self._path}: {difference}: use the same settings, or name another --output")
        if not content.endswith(b"\n"):  # a line that was being written when the machine stopped is left out
            with replacing(self._path) as partial:
                partial.write_text("".join(json.dumps(row) + "\n" for row in rows))


def missing(file: RoundsFile, settings: Settings, rounds: int) -> list[tuple[int, int]]:
    """Rounds, from 1, and numbers of the loads that are still to be measured, in their order."""
    all_of_them = [(round_, load) for round_ in range(1, rounds + 1) for load in range(len(settings.requests))]
    return [place for place in all_of_them if not file.has(*place)]


def turns(variants: list[str], round_: int) -> list[str]:
    """The order of a round: each variant comes first in turn, so that no place in the round favours one.

    Example:
        >>> turns(["stock", "off", "sam"], 2)
        ['off', 'sam', 'stock']
    """
    first = (round_ - 1) % len(variants)
    return variants[first:] + variants[:first]


def emit_history(engines: Iterable[EngineProcess], settings: Settings, history: list[Group]) -> None:
    """Let every engine emit an earlier epoch's responses once, uncounted, so that drafters have their text."""
    if history:
        batch = requests_of(history, [len(group.responses) for group in history], None)
        for engine in engines:
            engine.ask({"run": batch, "sampling": settings.sampling(), "record": False, "forget": False})


def measure(
    engines: dict[str, EngineProcess],
    settings: Settings,
    groups: list[Group],
    file: RoundsFile,
    rounds: int,
    advance: Callable[[str], None],
) -> None:
    """Measure what is missing of `rounds` rounds; each variant runs each load once before, uncounted.

    Args:
        engines: started, by variant.
        advance: called after each run with what comes next, in words.
    """
    places = missing(file, settings, rounds)
    # With two cores an engine there is always one left for the next.
    crowded = (os.cpu_count() or 1) < 2 * len(engines)
    rest = REST_SECONDS if crowded and any(engine.has_workers() for engine in engines.values()) else 0.0
    for load in sorted({load for _, load in places}):
        for variant in settings.variants:
            _run(engines[variant], settings, groups, WARM_UP, load, rest)
            advance("warm-up")
    for round_, load in places:
        runs = {}
        for variant in turns(settings.variants, round_):
            runs[variant] = _run(engines[variant], settings, groups, round_, load, rest)
            if (recorded := runs[variant].pop("recorded", None)) is not None:
                file.record(settings.requests[load], variant, recorded)
            advance(f"round {round_}, {settings.requests[load]} requests")
        file.append({"round": round_, "load": load, "requests": settings.requests[load], "runs": runs})


def _run(
    engine: EngineProcess, settings: Settings, groups: list[Group], round_: int, load: int, rest: float
) -> dict[str, Any]:
    time.sleep(rest)
    forget = come_again(settings, load, round_, groups)
    common = {"sampling": settings.sampling(), "record": round_ == RECORDED_ROUND, "forget": forget}
    batches = batches_of(settings, load, round_, groups)
    return joined([engine.ask({"run": batch, **common}) for batch in batches]) | {"start_s": engine.start_s}


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of the batches that an engine ran one after another.

    Args:
        batches: as sam.vllm.bench.engine.BenchEngine.run returns each.

    Returns:
        The same names: sums, so that time between batches is not in `seconds`; of `memory_mib` the most; `responses` of
        all; `recorded` a list of each batch's. `batch_seconds`: of each batch.
    """
    run = {name: _joined(name, batches) for name in batches[0]}
    return run | {"batch_seconds": [batch["seconds"] for batch in batches]}


def _joined(name: str, batches: list[dict[str, Any]]) -> Any:
    values = [batch[name] for batch in batches]
    match name:
        case "recorded":
            return values
        case "responses":
            return [response for responses in values for response in responses]
        case "memory_mib":
            return max(values)
        case "asynchronous":
            return values[-1]
        case "replays":
            return sum_of_replays(batches)
    return None if None in values else round(sum(values), 6)
