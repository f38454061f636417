"""Which of verl's checkpoints of a run can be read, and which one the run goes on from.

verl writes global_step_N below trainer.default_local_dir, and then N into a tracker file there, from which it resumes.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam_recipe.record import CONFIG_FILE

FOLDER = "checkpoints"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
LAST_FILE = "data.pt"  # the last that verl writes into a checkpoint
# A checkpoint of up to so many bytes is read to the end, in seconds; of larger ones the tables of contents.
WHOLE_BYTES = 4 << 30
RANK_NAME = "actor/{}_world_size_{}_rank_{}.pt"
RANK_FILE = re.compile(RANK_NAME.format("(.+)", r"(\d+)", r"\d+"))
FSDP_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}  # by verl's load_contents


def find(config: DictConfig) -> tuple[int, Path | None, list[str]]:
    """Where a run of this config goes on: after which step, from which folder, and why newer ones cannot be read.

    (0, None, []) where it begins. With resume_mode=auto verl's tracker then says so too.

    Raises:
        ValueError: the checkpoint that was named cannot be read, or none can; what is wrong, and perhaps the remedy.
    """
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        folder = Path(trainer.resume_from_path or "").absolute()
        if not re.fullmatch(r"global_step_\d+", folder.name):
            raise ValueError(f"trainer.resume_from_path={trainer.resume_from_path}", "name a folder global_step_N")
        if problem := damage(folder, config):
            raise ValueError(f"trainer.resume_from_path={folder}: {problem}", go_on_before(folder))
        return _step_of(folder), folder, []
    place = Path(trainer.default_local_dir)
    folder, skipped = _newest(_candidates(place), config) if trainer.resume_mode == "auto" else (None, [])
    if folder:
        (place / TRACKER_FILE).write_text(str(_step_of(folder)))
        return _step_of(folder), folder, skipped
    if skipped and _tracked(place) is not None:  # else the first was never finished
        raise ValueError("; ".join(skipped))
    return 0, None, []


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


def resumes_after(run_directory: Path) -> int | None:
    """The step after which the same command would go on; None where it would begin again."""
    place, resumes = _kept(run_directory)
    newest, _ = _newest(_candidates(place))
    return _step_of(newest) if resumes and newest else None


def remove_unfinished(run_directory: Path, since: float) -> None:
    """Remove checkpoints newer than the last complete one, of those that changed after `since` (seconds, epoch)."""
    place = _kept(run_directory)[0]
    for folder in _folders(place):
        with suppress(OSError):
            if _step_of(folder) > (_tracked(place) or 0) and folder.stat().st_mtime >= since:
                shutil.rmtree(folder)


def damage(folder: Path, config: DictConfig | None = None) -> str | None:
    """What is missing in a checkpoint or cut off; None where nothing is seen. `config` says which parts are loaded."""
    if not (folder / LAST_FILE).is_file():
        return f"{LAST_FILE if folder.is_dir() else 'the folder'} is missing"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "huggingface" not in path.parts]
    whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    for path in files:
        if said := _damage_of_file(path, whole):
            return f"{path.relative_to(folder)} {said}"
    names = {path.relative_to(folder).as_posix() for path in files if path.is_relative_to(folder / "actor")}
    if not names:
        return "actor is missing"
    # FSDP writes one file of each kind and rank.
    found = [match for name in names if (match := RANK_FILE.fullmatch(name))]
    loaded = config.actor_rollout_ref.actor.checkpoint.load_contents if config is not None else ()
    kinds = {match[1] for match in found} | {FSDP_FILES[part] for part in loaded if part in FSDP_FILES}
    sizes = {int(match[2]) for match in found}
    wanted = {RANK_NAME.format(kind, size, rank) for kind in kinds for size in sizes for rank in range(size)}
    return f"{min(wanted - names)} is missing" if wanted - names else None


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


def _kept(run_directory: Path) -> tuple[Path, bool]:
    """Where a run's checkpoints are, and whether it resumes, by the config that its directory holds."""
    with suppress(Exception):  # YAML's and OmegaConf's, which share no class
        trainer = OmegaConf.load(run_directory / CONFIG_FILE).trainer
        return Path(trainer.get("default_local_dir") or run_directory / FOLDER), trainer.get("resume_mode") != "disable"
    return run_directory / FOLDER, True


def _tracked(place: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((place / TRACKER_FILE).read_text())
    return None


def _newest(folders: Iterable[Path], config: DictConfig | None = None) -> tuple[Path | None, list[str]]:
    """The first that can be read, and why those before it cannot."""
    skipped = []
    for folder in folders:
        if (problem := damage(folder, config)) is None:
            return folder, skipped
        skipped.append(f"{folder} cannot be read: {problem}")
    return None, skipped


def _newest_before(folder: Path) -> Path | None:
    return _newest(one for one in _folders(folder.parent) if _step_of(one) < _step_of(folder))[0]


def _candidates(place: Path) -> list[Path]:
    """The one that the tracker names, and those before it; all where a full disk or a copy left no tracker."""
    last, found = _tracked(place), _folders(place)
    if last is None:
        return found
    return [place / f"global_step_{last}", *(one for one in found if _step_of(one) < last)]


def _folders(place: Path) -> list[Path]:
    """Newest first."""
    folders = [one for one in place.glob("global_step_*") if one.name.rpartition("_")[2].isdigit()]
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
