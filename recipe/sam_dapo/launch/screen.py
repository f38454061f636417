"""What the screen says of a run: its phases, steps and warnings, and in the last line why it ended and how to go on.

verl writes global_step_N below trainer.default_local_dir, LAST_FILE last, and then N into a tracker file there, from
which it resumes.
"""

import errno
import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO
from zipfile import is_zipfile

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.record import ROLLOUT, STATE_FILE, VALIDATING, read_json, read_metrics
from sam.command import CLEAR
from sam.log import LINE
from sam.record.responses import CONFIG_FILE, METRICS_FILE

LOG_FILE = "train.log"
ERROR_FILE = "error.txt"  # in the private folder: the exception that ends a run
LONGEST_REASON = 400  # characters
# Titles set with setproctitle: a run cannot go on without any of these processes.
ROLES = {
    "VLLM::EngineCore": "the vLLM engine",
    "VLLM::Worker": "a worker of vLLM",
    "ray::SpeculationServer": "a rollout server",
    "ray::ContextRouter": "the router",
    "ray::ActorRolloutRefWorker": "a worker of the trainer",
    "ray::WorkerDict": "a worker of the trainer",
    "ray::TaskRunner": "the trainer",
}
DEATHS = ("ActorDiedError", "ActorUnavailableError", "EngineDeadError", "WorkerCrashedError", "LocalRayletDiedError")
RAISED = "error raised in its creation task"  # Ray's word for an actor whose __init__ raised: it died of nothing else
FULL_DISK = re.compile(
    rf"Errno {errno.ENOSPC}|No space left on device|PytorchStreamWriter failed writing|iostream error"
    r"|inline_container.*unexpected pos"  # what torch.save says last
)
EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b(?!\().*", re.MULTILINE)
TRACKER_FILE = "latest_checkpointed_iteration.txt"
LAST_FILE = "data.pt"
FOLDER = re.compile(r"global_step_\d+")
OTHERWISE = (
    "put it back, name another with trainer.resume_mode=resume_path trainer.resume_from_path=FOLDER, or begin again "
    "with trainer.resume_mode=disable"
)
# Of a step's metrics.
SHOWN = {
    "timing_s/step": "{:.1f} s",
    "rollout/seconds": "rollout {:.1f} s",
    "rollout/reward_all/mean": "reward {:+.2f}",
    "response_length/mean": "response {:.0f} tokens",
    "rollout/spec_accept_length": "acceptance length {:.2f}",
}
OFFLINE = "wandb/offline-run-*"  # in the run's directory, of a run without wandb's key
LINE_SECONDS = 60.0  # between lines on what goes on, where the screen is a file


class Progress:
    """Follows a run: lines of phases, steps and warnings, and on a terminal a last one that moves; a file gets that now
    and then. `first`: the step that a resumed run goes on from."""

    def __init__(self, run_directory: Path, total_steps: int | None, first: int = 0):
        self.run_directory = run_directory
        self.total_steps = total_steps
        self.step = first
        self.shown: set[str] = set()  # lines
        self.read_bytes = Counter()  # of each file
        self.moving = ""
        self.next_line = time.monotonic() + LINE_SECONDS
        self._new_lines(LOG_FILE)

    def update(self) -> None:
        """Show what is new; called a few times a second."""
        state = read_json(self.run_directory / STATE_FILE)
        phase = state.get("phase", "finished")
        if is_outside_steps(phase):
            self._say(phase)
        for row in map(json.loads, self._new_lines(METRICS_FILE).splitlines()):
            if row["step"] > self.step:
                self.step = row["step"]
                self._say(f"training: {self._place()}: {figures_of(row)}")
        for parts in LINE.findall(self._new_lines(LOG_FILE)):
            self._say(f"warning: {': '.join(parts)}")
        if phase != "finished":
            self._move(progress_of(state, self.step + 1, time.time()))

    def _place(self) -> str:
        """Which of all steps the last one was, where their number is known."""
        return f"step {self.step} of {self.total_steps}" if self.total_steps else f"step {self.step}"

    def _say(self, line: str) -> None:
        """Each line once."""
        if line not in self.shown:
            self.shown.add(line)
            self.moving = ""
            print_line(line, sys.stderr)

    def _move(self, line: str) -> None:
        """Put a line in place of the last one that moved."""
        if sys.stderr.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]
            if line != self.moving:
                self.moving = line
                print(CLEAR + line, end="", file=sys.stderr, flush=True)
        elif time.monotonic() > self.next_line:
            self.next_line = time.monotonic() + LINE_SECONDS
            print_line(line, sys.stderr)

    def _new_lines(self, name: str) -> str:
        """What has been appended to a file since the last call; all of one that was written anew."""
        with suppress(FileNotFoundError), open(self.run_directory / name, "rb") as file:
            if file.seek(0, 2) < self.read_bytes[name]:
                self.read_bytes[name] = 0
            file.seek(self.read_bytes[name])
            lines, newline, _ = file.read().rpartition(b"\n")
            self.read_bytes[name] += len(lines + newline)
            return lines.decode(errors="replace")
        return ""


def figures_of(row: dict[str, float]) -> str:
    """What the screen says of a step's metrics."""
    return ", ".join(text.format(row[key]) for key, text in SHOWN.items() if key in row)


def print_line(line: str, screen: TextIO) -> None:
    """A line that stays, in place of one that moved."""
    print(CLEAR + line if screen.isatty() else line, file=screen, flush=True)


def is_outside_steps(phase: str) -> bool:
    """Whether a phase belongs to no training step and stands on a line of its own."""
    return phase.startswith("starting") or phase == VALIDATING


def progress_of(state: dict, step: int, now: float) -> str:
    """What a run does at the time `now`, by what STATE_FILE says; within 80 columns where numbers are small."""
    phase = state["phase"].replace("_", " ")
    seconds = max(0.001, now - state["since"])
    if not is_outside_steps(phase):
        phase = f"step {step}" if phase == ROLLOUT else f"step {step}: {phase}"
    elapsed = tqdm.format_interval(seconds)
    if "done" not in state:
        return f"{phase}, {elapsed}"
    parts = [f"{phase}: {state['done']}/{state['all']} done"]
    if state["done"]:
        left = seconds * (state["all"] / state["done"] - 1)
        parts.append(f"{tqdm.format_interval(left)} left")
    else:
        parts.append(elapsed)
    if state.get("tokens"):
        tokens = tqdm.format_sizeof(state["tokens"])
        rate = tqdm.format_sizeof(state["tokens"] / max(0.001, state["at"] - state["since"]))
        parts += [f"{tokens} tokens", f"{rate}/s", f"{state['running']} running", f"length {state['length']:.2f}"]
    return ", ".join(parts)


def newest(config: DictConfig) -> Path | None:
    """The folder of checkpoints that trainer.resume_from_path or verl's tracker names; None where a run begins."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path or "").absolute()
    tracker = Path(trainer.default_local_dir) / TRACKER_FILE
    if trainer.resume_mode == "auto" and tracker.is_file():
        return tracker.with_name(f"global_step_{tracker.read_text().strip()}")
    return None


def checkpoint(config: DictConfig) -> Path | None:
    """The folder from which a run of this config goes on, None where it begins: the newest, with resume_mode=auto the
    newest that is whole. ConfigError: there is none."""
    folder = newest(config)
    if folder is None or is_whole(folder):
        return folder
    if config.trainer.resume_mode == "auto":
        limit = step_of(folder) if FOLDER.fullmatch(folder.name) else math.inf
        others = filter(is_whole, folder.parent.glob("global_step_*"))
        before = [other for other in others if step_of(other) < limit]
        if before:
            return max(before, key=step_of)
    raise ConfigError(
        f"{folder}: no whole checkpoint, global_step_N with {LAST_FILE}: {OTHERWISE} [run_dir.checkpoint]"
    )


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has what verl writes last, and parts that end as torch.save ends them: with a zip archive's
    index. Of one that verl has removed, LAST_FILE alone is left."""
    parts = [*folder.rglob("*.pt")]
    if not FOLDER.fullmatch(folder.name) or folder / LAST_FILE not in parts or not any(folder.glob("actor/*")):
        return False
    if not all(map(is_zipfile, parts)):
        return False
    by_kind = Counter(re.findall(r"(.+_world_size_(\d+)_rank_)", "\n".join(map(str, parts))))
    return all(count == int(ranks) for (_, ranks), count in by_kind.items())


def step_of(folder: Path) -> int:
    """Of global_step_N."""
    return int(folder.name.rpartition("_")[2])


def resumes_after(run_directory: Path) -> int | None:
    """The step after which the same command would go on; None where it would not."""
    with suppress(Exception):  # YAML's and OmegaConf's, which share no class, and ConfigError
        folder = checkpoint(OmegaConf.load(run_directory / CONFIG_FILE))
        if folder:
            return step_of(folder)
    return None


class Ending(NamedTuple):
    """How a run ended: the command's exit code, why in one line (None after a run that finished), what to do before it
    is started again, and whether the same command would then go on."""

    code: int
    reason: str | None = None
    advice: str = ""
    repeats: bool = True


def role_of(title: str) -> str | None:
    """Which part of a run a process is, by its title; None for one that may end while the run goes on."""
    return next((role for start, role in ROLES.items() if start in title), None)


def is_death(text: str) -> bool:
    """Whether an exception says no more than that a process died."""
    return RAISED not in text and any(name in text for name in DEATHS)


def failed(code: int, dead: dict[str, str], text: str, run_directory: Path, origin: Path | None) -> Ending:
    """The ending of a run that failed with an exit code, above 128 when a signal ended it.

    `dead` are the processes whose death came first, names by role; `text` is the exception's; `origin` the checkpoint
    that the run loads.
    """
    if FULL_DISK.search(text):
        # Python's own code is 120 where it cannot write out what it has printed.
        return Ending(1, f"no space left on the disk of {run_directory}", "free some space")
    if lost := re.search(r"\bNodeLostError: (.+)", text):
        return Ending(code, lost[1], "start Ray there again, or on another node")
    if dead or is_death(text):
        return Ending(code, _death(dead, text), "if nobody killed it, the log says more: often memory")
    if origin and "load_checkpoint" in text:
        return Ending(code, f"{origin} cannot be loaded ({_exception(text)})", OTHERWISE, repeats=False)
    if text:
        return Ending(code, _exception(text), "correct the cause")
    if code > 128:
        return Ending(code, f"the run's own process was killed (signal {code - 128})")
    return Ending(code, f"the run ended with exit code {code}")


def _death(dead: dict[str, str], text: str) -> str:
    """Which process died, and on which other node: vLLM's message says the engine's, Ray's has the actor's class."""
    role = ROLES["VLLM::EngineCore"] if "EngineDeadError" in text else None
    class_name = re.search(r"\bclass_name: ([\w.:<>]+)", text)
    if class_name:
        role = role_of(f"ray::{class_name[1].rpartition('.')[2]}") or class_name[1]
    if dead:
        first = next(iter(dead.values()))
        return f"{dead.get(role, first)} was killed or crashed"
    address = re.search(r"^\s*ip: ([\w.:<>]+)", text, re.MULTILINE)
    place = f" on {address[1]}" if address else ""
    return f"{role or 'a process of Ray'} was killed or crashed{place}"


def _exception(text: str) -> str:
    """The last line of an exception; a ConfigError's is one by itself."""
    lines = EXCEPTION_LINE.findall(text) or text.strip().splitlines()
    line = lines[-1].strip().removeprefix(f"{ConfigError.__module__}.{ConfigError.__name__}: ")
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def last_line(run_directory: Path, ending: Ending) -> str:
    """One line for the screen and the log."""
    log = run_directory / LOG_FILE
    done = max(read_metrics(run_directory), default=0)
    if ending.reason is None:
        line = f"finished after {done} steps; log: {log}; look at it: sam report {run_directory}"
        if any(run_directory.glob(OFFLINE)):
            line += f"; upload it: wandb sync {run_directory / OFFLINE}"
        return line
    is_starting = read_json(run_directory / STATE_FILE).get("phase", "starting").startswith("starting")
    when = "while starting" if is_starting else f"in step {done + 1}"
    sign = "" if ending.code == 130 else "error: "
    remedies = [ending.advice] if ending.advice else []
    if ending.repeats:
        remedies.append(f"the same command {_what_repeating_does(run_directory)}")
    return f"{sign}{ending.reason}, {when}; log: {log}; {'; then '.join(remedies)}"


def _what_repeating_does(run_directory: Path) -> str:
    saved = resumes_after(run_directory)
    if saved is None:
        return "starts from the beginning (no checkpoint to go on from)"
    return f"goes on after step {saved}"


def write_last_line(run_directory: Path, ending: Ending, screen: TextIO | None = None) -> None:
    """To the log and to the screen, either of which may be gone or full."""
    line = last_line(run_directory, ending)
    with suppress(OSError), open(run_directory / LOG_FILE, "a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    with suppress(OSError):
        print_line(line, screen or sys.stderr)
