"""Which of verl's checkpoints in a run directory are complete, and what remains of those that are not.

verl writes checkpoints/global_step_N and then N into a tracker file beside them, from which a run resumes.
"""

import shutil
from contextlib import suppress
from pathlib import Path

FOLDER = "checkpoints"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
LAST_FILE = "data.pt"  # the last that verl writes into a checkpoint


def last_complete(run_directory: Path) -> int | None:
    """The training step of the checkpoint that a run would resume from."""
    with suppress(OSError, ValueError):
        return int((run_directory / FOLDER / TRACKER_FILE).read_text())
    return None


def repair_tracker(run_directory: Path) -> None:
    """Where the disk was full, verl may leave the tracker empty, and could not resume."""
    tracker = run_directory / FOLDER / TRACKER_FILE
    if not tracker.exists() or tracker.read_text().strip():
        return
    complete = [step for step, folder in _steps(run_directory) if (folder / LAST_FILE).exists()]
    if complete:
        tracker.write_text(str(max(complete)))
    else:
        tracker.unlink()


def remove_unfinished(run_directory: Path, since: float) -> None:
    """Remove checkpoints newer than the last complete one, of those that changed after `since` (seconds, epoch)."""
    last = last_complete(run_directory) or 0
    for step, folder in _steps(run_directory):
        with suppress(OSError):
            if step > last and folder.stat().st_mtime >= since:
                shutil.rmtree(folder)


def _steps(run_directory: Path) -> list[tuple[int, Path]]:
    folders = (run_directory / FOLDER).glob("global_step_*")
    return [(int(name), folder) for folder in folders if (name := folder.name.rpartition("_")[2]).isdigit()]
