"""The last line of a run: why it ended, where the log is, how to go on."""

import errno
import json
import re
import shutil
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sam_recipe.launch import checkpoints
from sam_recipe.record import STATE_FILE, VALIDATING, read_json, read_metrics

LOG_FILE, ERROR_FILE = "train.log", "error.json"
LONGEST_REASON = 240  # characters
LEAST_FREE = 16 << 20  # bytes, on a disk that is not full
CONSEQUENCE_SECONDS = 0.5  # an exception that ends the run, later than this after a process died, is a consequence
# Titles set with setproctitle: a run cannot go on without any of these processes.
ROLES = {
    "VLLM::EngineCore": "the vLLM engine",
    "VLLM::Worker": "a worker of vLLM",
    "ray::SpeculationServer": "a rollout server",
    "ray::ContextRouter": "the router",
    "ray::SessionWorker": "a worker of the trainer",
    "ray::WorkerDict": "a worker of the trainer",
    "ray::TaskRunner": "the trainer",
}
DEATHS = ("ActorDiedError", "ActorUnavailableError", "EngineDeadError", "WorkerCrashedError", "LocalRayletDiedError")
RAISED = "error raised in its creation task"  # Ray's word for an actor whose __init__ raised: it died of nothing else
CAUSED = "\nThe above exception was the direct cause of the following exception:"
FULL_DISK = re.compile(
    rf"Errno {errno.ENOSPC}|No space left on device|PytorchStreamWriter failed writing|iostream error"
    r"|inline_container.*unexpected pos"  # what torch.save says last
)
# What torch, pickle and zipfile say of a file that is cut off or damaged.
UNREADABLE = re.compile(
    r"PytorchStreamReader|UnpicklingError|EOFError|BadZipFile|invalid load key|[Cc]orrupt|JSONDecodeError"
    r"|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|CheckpointException"
)
EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b(?!\().*", re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    code: the command's exit code. reason: one line; None after a run that finished. advice: what to do before the run
    is started again. unreadable: the checkpoint from which it could not go on.
    """

    code: int
    reason: str | None = None
    advice: str = ""
    unreadable: Path | None = None


def write_error(folder: Path, error: BaseException) -> None:
    """Leave the exception that ends a run in its private folder, for the process that says how it ended."""
    content = {"type": type(error).__name__, "text": "".join(traceback.format_exception(error)), "at": time.time()}
    with suppress(OSError):  # a full disk
        (folder / ERROR_FILE).write_text(json.dumps(content))


def role_of(title: str) -> str | None:
    """Which part of a run a process is, by its title; None for one that may end while the run goes on."""
    return next((role for start, role in ROLES.items() if start in title), None)


def role_said(text: str) -> str | None:
    """The part of a run whose death an exception tells of: vLLM's says the engine's, Ray's has the actor's class."""
    if name := re.search(r"\bclass_name: ([\w.:<>]+)", text):
        return role_of(f"ray::{name[1].rpartition('.')[2]}") or name[1]
    return ROLES["VLLM::EngineCore"] if "EngineDeadError" in text else None


def is_death(error: dict) -> bool:
    """Whether an exception says no more than that a process died."""
    return RAISED not in error["text"] and any(name in error["type"] + error["text"] for name in DEATHS)


def who_died(dead: dict[str, str], died_at: float, error: dict | None) -> str | None:
    """Of the dead processes, names by role, the one that ended the run; None where they ended because of `error`."""
    if error and died_at > error["at"] - CONSEQUENCE_SECONDS and not is_death(error):
        return None
    return dead.get(role_said(error["text"]) if error else None) or next(iter(dead.values()), None)


def failed(code: int, died: str | None, error: dict | None, run_directory: Path, origin: Path | None = None) -> Ending:
    """The ending of a run that failed with an exit code, above 128 when a signal ended it.

    `died` is the process whose death ended it; `error` what `write_error` wrote; `origin` the checkpoint that it loads.
    """
    text, folder = error["text"] if error else "", run_directory / checkpoints.FOLDER
    free = shutil.disk_usage(folder if folder.exists() else run_directory).free
    # Where the temporary directory is on the same disk, the exception could not be written either.
    if FULL_DISK.search(text) or (not text and not died and free < LEAST_FREE):
        where = f"the checkpoint of step {_steps_done(run_directory) + 1}" if "checkpoint" in text else "a file"
        reason = f"no space left on the disk of {folder} ({free / 2**30:.1f} GiB free) for {where}"
        return Ending(code, reason, "free some space")
    if lost := re.search(r"\bNodeLostError: (.+)", text):
        return Ending(code, lost[1], "start Ray there again, or on another node")
    if died or (error and is_death(error)):
        # Ray's message has the node's address where the process ran on another node.
        address = None if died else re.search(r"^\s*ip: ([\w.:<>]+)", text, re.MULTILINE)
        reason = f"{died or role_said(text) or 'a process of Ray'} was killed or crashed"
        reason += f" on {address[1]}" if address else ""
        return Ending(code, reason, "if nobody killed it, the log says more: often memory")
    if origin and "load_checkpoint" in text and UNREADABLE.search(text):
        return Ending(code, f"{origin} cannot be read ({_exception(error)})", unreadable=origin)
    if error:
        return Ending(code, _exception(error), "correct the cause")
    if code > 128:
        return Ending(code, f"the run's own process was killed (signal {code - 128})")
    return Ending(code, f"the run ended with exit code {code}")


def _exception(error: dict) -> str:
    """The last line of an exception, after its cause where an actor could not be made."""
    lines = EXCEPTION_LINE.findall(error["text"])
    text = lines[-1] if lines else f"{error['type']}: {(error['text'].strip().splitlines() or [''])[0]}"
    if RAISED in error["text"] and (causes := EXCEPTION_LINE.findall(error["text"].rpartition(CAUSED)[0])):
        text = f"{causes[-1]} ({text})"
    return text.strip() if len(text) <= LONGEST_REASON else text.strip()[: LONGEST_REASON - 3] + "..."


def last_line(run_directory: Path, ending: Ending) -> str:
    """One line for the screen and the log."""
    log, done = run_directory / LOG_FILE, _steps_done(run_directory)
    if ending.reason is None:
        is_offline = any(run_directory.glob(offline := "wandb/offline-run-*"))
        upload = f"; upload it: wandb sync {run_directory / offline}" * is_offline
        return f"finished after {done} steps; log: {log}; look at it: sam report {run_directory}{upload}"
    if ending.unreadable:
        again = checkpoints.go_on_before(ending.unreadable)
    elif (saved := checkpoints.resumes_after(run_directory)) is None:
        again = "the same command starts from the beginning (no checkpoint to go on from)"
    else:
        again = f"the same command goes on after step {saved}"
    sign = "" if ending.code == 130 else "error: "
    advice = f"{ending.advice}; then " if ending.advice else ""
    phase = read_json(run_directory / STATE_FILE).get("phase", "starting")
    when = "while starting" if phase.startswith("starting") else f"in step {done + 1}"
    when = f"in the {phase}" if phase == VALIDATING else when
    return f"{sign}{ending.reason}, {when}; log: {log}; {advice}{again}"


def write_last_line(run_directory: Path, ending: Ending) -> None:
    """To the log and to the screen, either of which may be gone or full."""
    line = last_line(run_directory, ending)
    with suppress(OSError), open(run_directory / LOG_FILE, "a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _steps_done(run_directory: Path) -> int:
    """The last training step with a row in metrics.jsonl."""
    return max(read_metrics(run_directory), default=0)
