"""Rounds of loads in which the variants take turns, kept in a file as they are measured."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from sam.bench.engine_process import EngineError, EngineProcess, stop_all
from sam.bench.environment import environment_of
from sam.bench.loads import WARM_UP, batches_of
from sam.bench.prompts import Group
from sam.bench.settings import Settings, engine_arguments
from sam.reading import json_object, one_line
from sam.record.atomic import replacing

Place = tuple[int, int]  # a round, from 1, and a load's number


class RoundsFile:
    """rounds.json: what is measured, and each load of each round.

    Attributes:
        lines: by round and number of the load: `round`, `load`, and `runs` by variant.

    Raises:
        ValueError: the file is there and the settings do not go on with it, or it is of another measurement.
    """

    def __init__(self, settings: Settings, digest: str):
        """`digest`: of all prompts, and of the responses that are forced."""
        self._path = path = settings.output / "rounds.json"
        self._settings = settings
        self._own = settings.of_measurement() | {"prompts": digest}
        self.lines: dict[Place, dict[str, Any]] = {}
        if path.exists():
            if not settings.resume:
                raise ValueError(f"{path} is there already: go on with --resume, or name another --output")
            found = json_object(path)
            with one_line(str(path), "not rounds of sam.bench: name another --output"):
                was = found["settings"]
                self.lines = {(line["round"], line["load"]): line for line in found["rounds"] if line["runs"]}
            for name, value in self._own.items():
                if was.get(name) != value:
                    change = f"{name.replace('_', '-')} was {was.get(name)}, now {value}"
                    raise ValueError(f"{path}: {change}: use the same settings, or name another --output")
        settings.output.mkdir(parents=True, exist_ok=True)

    def add(self, place: Place, runs: dict[str, dict[str, Any]]) -> None:
        """Keep what was measured of a load in a round, on disk at once; of one measured again the last holds."""
        self.lines[place] = {"round": place[0], "load": place[1], "runs": runs}
        with replacing(self._path) as partial:
            partial.write_text(json.dumps({"settings": self._own, "rounds": list(self.lines.values())}))

    def missing(self, variants: list[str]) -> list[Place]:
        """Places that lack one of the variants, in their order."""
        loads = range(len(self._settings.requests))
        places = [(round_, load) for round_ in range(1, self._settings.rounds + 1) for load in loads]
        return [place for place in places if not {*variants} <= self.lines.get(place, {"runs": {}})["runs"].keys()]


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

    def __init__(self, settings: Settings, groups: list[Group]):
        self._settings, self._groups = settings, groups
        self._engines: dict[str, EngineProcess] = {}
        self.faults: dict[str, str] = {}

    def measure(self, file: RoundsFile) -> None:
        """Start all and measure what is missing; each variant runs each load once before, uncounted.

        Raises:
            EngineError: the reference refused or ended.
        """
        variants = self._settings.variants
        if not (places := file.missing(variants)):
            return
        loads = sorted({load for _, load in places})
        try:
            with tqdm(total=len(variants) * (1 + len(places) + len(loads)), unit="run", disable=None) as bar:
                self._start(bar)
                for load in loads:
                    for _ in self._runs(variants, WARM_UP, load, bar):
                        pass
                for round_, load in file.missing(list(self._engines)):
                    file.add((round_, load), dict(self._runs(turns(variants, round_), round_, load, bar)))
                bar.set_description("ending the engines")
        finally:
            stop_all(self._engines.values())

    def _start(self, bar: tqdm) -> None:
        """One after the other, since vLLM finds its memory by watching what is free; side by side where it is told."""
        variants, is_told = self._settings.variants, "kv_cache_memory_bytes" in engine_arguments(self._settings.engine)
        for together in [variants] if is_told else [[variant] for variant in variants]:
            bar.set_description(f"starting {', '.join(together)}")
            for variant in together:
                log = self._settings.output / f"{variant}.log"
                self._engines[variant] = EngineProcess(variant, log, environment_of(variant))
            starts = ThreadPoolExecutor(len(together))
            try:
                for _ in starts.map(self._ask, together, map(self._settings.start, together)):
                    bar.update()
            finally:
                starts.shutdown(wait=False)  # where this is interrupted, what is asked ends with its engine

    def _runs(self, variants: list[str], round_: int, load: int, bar: tqdm) -> Iterator[tuple[str, dict[str, Any]]]:
        """Variant and run of those whose engines are up, as sam.vllm.bench.engine.BenchEngine.run returns it."""
        settings = self._settings
        bar.set_description(f"round {round_}, {settings.requests[load]} requests" if round_ else "warm-up")
        sampling = {name: getattr(settings, name) for name in ("temperature", "max_tokens", "ignore_eos")}
        command = {"batches": batches_of(settings, round_, load, self._groups), "sampling": sampling}
        for variant in variants:
            if variant in self._engines and (run := self._ask(variant, command)) is not None:
                yield variant, run
            bar.update()

    def _ask(self, variant: str, command: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._engines[variant].ask(command)
        except EngineError as error:
            if variant == self._settings.reference:
                raise
            self.faults[variant] = str(error)
            self._engines.pop(variant).stop()
            return None
