"""Which of verl's checkpoints of a run can be read, and which one the run goes on from.

verl writes global_step_N below trainer.default_local_dir, and then N into a tracker file there, from which it resumes.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.record import CONFIG_FILE

FOLDER = "checkpoints"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
LAST_FILE = "data.pt"  # the last that verl writes into a checkpoint
# A checkpoint of up to so many bytes is read to the end, in seconds; of larger ones the tables of contents.
WHOLE_BYTES = 4 << 30
RANK_FILE = re.compile(r"(.+)_world_size_(\d+)_rank_(\d+)\.pt")
FSDP_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}  # by verl's load_contents


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: after `step`, from `folder`. `skipped`: of newer checkpoints, why they cannot be read."""

    step: int
    folder: Path
    skipped: tuple[str, ...] = ()


def find(config: DictConfig) -> Resumed | None:
    """Where a run of this config goes on; None where it begins. With resume_mode=auto verl's tracker then says so too.

    Raises:
        ValueError: the checkpoint that was named cannot be read, or none can; what is wrong, and where it is known the
            remedy.
    """
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        folder = Path(trainer.resume_from_path or "").absolute()
        if not re.fullmatch(r"global_step_\d+", folder.name):
            raise ValueError(f"trainer.resume_from_path={trainer.resume_from_path}", "name a folder global_step_N")
        if problem := damage(folder, config):
            raise ValueError(f"trainer.resume_from_path={folder}: {problem}", go_on_before(folder))
        return Resumed(_step_of(folder), folder)
    place, skipped = Path(trainer.default_local_dir), []
    for step, folder in _candidates(place) if trainer.resume_mode == "auto" else ():
        if (problem := damage(folder, config)) is None:
            (place / TRACKER_FILE).write_text(str(step))
            return Resumed(step, folder, tuple(skipped))
        skipped.append(f"{folder} cannot be read: {problem}")
    if not skipped or _tracked(place) is None:
        return None  # the first was never finished
    raise ValueError("; ".join(skipped))


def go_on_before(folder: Path) -> str:
    """What to do about a checkpoint that cannot be read: go on from the newest before it that can be."""
    if earlier := _newest_before(folder):
        return f"go on with trainer.resume_mode=resume_path trainer.resume_from_path={earlier}"
    return "there is none before it: put it back, or begin again with trainer.resume_mode=disable"


def give_up(folder: Path) -> bool:
    """Let the next start go on from the checkpoint before this one; False where there is none that can be read."""
    if earlier := _newest_before(folder):
        (folder.parent / TRACKER_FILE).write_text(str(_step_of(earlier)))
    return earlier is not None


def _newest_before(folder: Path) -> Path | None:
    earlier = (candidate for step, candidate in _steps(folder.parent) if step < _step_of(folder))
    return next((candidate for candidate in earlier if damage(candidate) is None), None)


def resumes_after(run_directory: Path) -> int | None:
    """The step after which the same command would go on; None where it would begin again."""
    place, resumes = _kept(run_directory)
    found = (step for step, folder in _candidates(place) if damage(folder) is None)
    return next(found, None) if resumes else None


def damage(folder: Path, config: DictConfig | None = None) -> str | None:
    """What is missing in a checkpoint or cut off, in a few words; None where nothing is seen.

    `config`: which parts are loaded, and so have to be there.
    """
    if not (folder / LAST_FILE).is_file():
        return f"{LAST_FILE if folder.is_dir() else 'the folder'} is missing"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "huggingface" not in path.parts]
    whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    found = (f"{path.relative_to(folder)} {said}" for path in files if (said := _damage_of_file(path, whole)))
    return next(found, None) or next(_missing_ranks(folder / "actor", config), None)


def _damage_of_file(path: Path, whole: bool) -> str | None:
    try:
        if path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                if whole and (name := archive.testzip()):
                    return f"is damaged at {name}"
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif not path.stat().st_size and path.suffix in (".distcp", ".safetensors", ""):
            return "is empty"
    except zipfile.BadZipFile:
        return "is cut off or damaged"
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        return f"cannot be read ({str(error) or type(error).__name__})"
    return None


def _missing_ranks(actor: Path, config: DictConfig | None) -> Iterator[str]:
    names = {path.name for path in actor.iterdir()} if actor.is_dir() else set()
    if not names:
        yield "actor is missing"
    found = [match for name in sorted(names) if (match := RANK_FILE.fullmatch(name))]
    kinds = {match[1] for match in found}
    if config is not None and found:
        loaded = config.actor_rollout_ref.actor.checkpoint.load_contents
        kinds |= {FSDP_FILES[part] for part in loaded if part in FSDP_FILES}
    for size in {int(match[2]) for match in found}:
        wanted = (f"{kind}_world_size_{size}_rank_{rank}.pt" for kind in sorted(kinds) for rank in range(size))
        yield from (f"actor/{name} is missing" for name in wanted if name not in names)


def _kept(run_directory: Path) -> tuple[Path, bool]:
    """Where a run's checkpoints are, and whether it resumes, by the config that its directory holds."""
    with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException, AttributeError):
        trainer = OmegaConf.load(run_directory / CONFIG_FILE).trainer
        return Path(trainer.get("default_local_dir") or run_directory / FOLDER), trainer.get("resume_mode") != "disable"
    return run_directory / FOLDER, True


def last_complete(run_directory: Path) -> int | None:
    """The training step of the checkpoint that verl would resume from."""
    return _tracked(_kept(run_directory)[0])


def _tracked(place: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((place / TRACKER_FILE).read_text())
    return None


def remove_unfinished(run_directory: Path, since: float) -> None:
    """Remove checkpoints newer than the last complete one, of those that changed after `since` (seconds, epoch)."""
    last = last_complete(run_directory) or 0
    for step, folder in _steps(_kept(run_directory)[0]):
        with suppress(OSError):
            if step > last and folder.stat().st_mtime >= since:
                shutil.rmtree(folder)


def _candidates(place: Path) -> list[tuple[int, Path]]:
    """The one that the tracker names, and those before it; all where a full disk or a copy left no tracker."""
    last = _tracked(place)
    found = [one for one in _steps(place) if last is None or one[0] <= last]
    if last is not None and last not in dict(found):
        found.insert(0, (last, place / f"global_step_{last}"))
    return found


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Newest first."""
    folders = [one for one in folder.glob("global_step_*") if one.name.rpartition("_")[2].isdigit()]
    return sorted(((_step_of(one), one) for one in folders), reverse=True)
