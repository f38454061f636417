"""Reads what the report compares: run directories, folders of wandb, and runs on a wandb server.

wandb 0.31 has no public reader of its own files. They are LevelDB's log format with messages of wandb.proto in it.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC
from pathlib import Path
from urllib.parse import urlsplit

from recipe.launch.environment import has_wandb_key
from recipe.launch.versions import RECORDED
from recipe.report.runs import ReportError, Run

EXPECTED = (
    "expected a run directory of recipe.main_dapo (its run_dir), a folder of wandb (offline-run-* or run-*, with "
    "run-ID.wandb in it), or a run on a wandb server as entity/project/run_id or its address"
)
MAGIC = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK = 32768  # bytes; a record is in parts where it would cross from a block into the next
PART = struct.Struct("<IHB")  # CRC-32 of type and data, bytes of data, type
WHOLE, FIRST, LAST = 1, 2, 4
# Entity, project, id; what follows in an address is a view of the run.
ADDRESSES = (
    re.compile(r"https?://.*?([\w.-]+)/([\w.-]+)/runs/([\w-]+)(?:[/?#].*)?"),
    re.compile(r"([\w.-]+)/([\w.-]+)/(?:runs/)?([\w-]+)"),
)
HOSTED = ("wandb.ai", "coreweave.com")  # where wandb's own client goes without being told
NOT_JSON = ("NaN", "Infinity", "-Infinity")


def load_run(source: str) -> Run:
    """Read a run, whatever `source` names it by.

    Raises:
        ReportError: `source` is none of what EXPECTED says, cannot be read, or has not trained.
    """
    path = Path(source)
    if (path / "metrics.jsonl").is_file():
        return Run.load(path)
    if logs := find_logs(path):
        return load_offline(source, logs)
    matches = [match for address in ADDRESSES if (match := address.fullmatch(source))]
    if path.exists() or not matches or source.startswith((".", "/")):
        raise ReportError(f"{source}: no metrics.jsonl there and nothing of wandb's; {EXPECTED}: check the path")
    return load_online(source, "/".join(matches[0].groups()))


def find_logs(path: Path) -> list[Path]:
    """The .wandb files of a run: `path` itself, in it, or of the parts of a resumed run below it, oldest first."""
    if path.is_file():
        return [path] if path.suffix == ".wandb" else []
    if found := sorted(path.glob("run-*.wandb")):
        return found
    # latest-run is a link to one of them; names go on with the date.
    parts = [log for folder in (path, path / "wandb") for log in folder.glob("*run-[0-9]*/run-*.wandb")]
    return sorted(parts, key=lambda log: log.parent.name.removeprefix("offline-"))


def load_offline(source: str, logs: list[Path]) -> Run:
    """A run from its files; where there are several, each goes on where the one before it was interrupted."""
    metrics: dict[int, dict[str, float]] = {}
    config: dict = {}
    versions: dict = {}
    names, finished = set(), False
    for log in logs:
        finished = False
        versions |= _requirements(log.parent / "files" / "requirements.txt")
        for record in read_records(log):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.add(record.run.display_name)
                _update(config, record.run.config.update)
            elif kind == "config":
                _update(config, record.config.update)
            elif kind == "environment" and record.environment.HasField("started_at"):
                versions["date"] = record.environment.started_at.ToDatetime(UTC).isoformat(timespec="seconds")
                versions["commit"] = record.environment.git.commit[:12] or None
            elif kind == "history":
                items = record.history.item
                row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
                metrics.setdefault(int(row.get("_step", record.history.step.num)), {}).update(numbers(row))
            finished = finished or kind == "exit"
    if len(names) > 1:
        raise ReportError(
            f"{source}: holds runs of different names ({', '.join(sorted(names))}); expected one run, or the parts of "
            "one that was resumed: name one of the folders in it"
        )
    run = Run(_method(config) or "".join(names), source, config, versions, metrics)
    if len(logs) > 1:
        run.remarks.append(f"{source}: {len(logs)} folders of wandb read as one run that was resumed")
    if not finished:
        run.remarks.append(f"{source}: the run goes on or was cut short; read up to step {max(metrics)}")
    return run


def read_records(log: Path) -> Iterator:
    """The records (wandb_internal_pb2.Record) of a .wandb file; a last one that is cut short is left out."""
    from wandb.proto import wandb_internal_pb2

    content = log.read_bytes()
    if not content.startswith(MAGIC):
        raise ReportError(f"{log}: not a file of wandb's or of another version; expected it to begin with {MAGIC!r}")
    position, data = len(MAGIC), b""
    while position + PART.size <= len(content):
        left = BLOCK - position % BLOCK
        if left < PART.size:  # too little for another part: zeros
            position += left
            continue
        checksum, length, kind = PART.unpack_from(content, position)
        part = content[position + PART.size : position + PART.size + length]
        if len(part) < length:
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise ReportError(f"{log}: damaged at byte {position}; expected a whole file of wandb's: copy it again")
        position += PART.size + length
        data = part if kind in (WHOLE, FIRST) else data + part
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(data)


def load_online(source: str, address: str) -> Run:
    """A run on a wandb server, through wandb's public API; `address` is entity/project/run_id."""
    if not has_wandb_key():
        raise ReportError(
            f"{source}: no such folder, and no key to look for a run of that name on a wandb server; {EXPECTED}: check "
            "the path, or set WANDB_API_KEY or run `wandb login`"
        )
    import wandb

    url = urlsplit(source)
    own_server = url.netloc and not url.netloc.endswith(HOSTED)
    overrides = {"base_url": f"{url.scheme}://{url.netloc}"} if own_server else None
    try:
        found = wandb.Api(overrides=overrides, timeout=60).run(address)
        rows, config, name, date = list(found.scan_history()), dict(found.config), found.name, found.created_at
    except Exception as error:  # wandb's own, its service's, its HTTP library's: nothing that they share
        raise ReportError(
            f"{source}: no such folder, and wandb says: {' '.join(str(error).split()) or type(error).__name__}; "
            f"{EXPECTED}: check the spelling, and that the key may read the project"
        ) from error
    metrics: dict[int, dict[str, float]] = {}
    for row in rows:
        metrics.setdefault(int(row["_step"]), {}).update(numbers(row))
    return Run(_method(config) or name, source, config, {"date": date}, metrics)


def numbers(row: dict) -> dict[str, float]:
    """The numbers of a history row without wandb's own keys, which begin with an underscore."""
    return {key: float(value) for key, value in row.items() if not key.startswith("_") and _is_number(value)}


def _is_number(value) -> bool:
    if isinstance(value, str):
        return value in NOT_JSON
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _method(config: dict) -> str | None:
    return (config.get("speculation") or {}).get("method")


def _update(config: dict, items: Iterable) -> None:
    """Take over a record's `update` items (key or nested_key, value_json)."""
    for item in items:
        *path, last = item.nested_key or [item.key]
        section = config
        for key in path:
            section = section.setdefault(key, {})
        if last != "_wandb":
            section[last] = json.loads(item.value_json)


def _requirements(path: Path) -> dict[str, str]:
    """Versions from what wandb keeps of `pip freeze`, without local part, of the packages a run records."""
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = (line.split("==", 1) for line in lines if "==" in line)
    return {name: version.split("+")[0] for name, version in pairs if name in RECORDED}
