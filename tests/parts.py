"""`python -m tests.parts`: how large this project is, by part: lines and files of Python, beside the lines decided.

And the commands, knobs and metrics that a user meets. scripts/test.sh prints it, so that CI shows it.
"""

import re
import subprocess
from pathlib import Path

from sam_recipe.command_line import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 17500  # 16,000, 900 for the second runner, 600 for verl's own scripts
# Part, the lines that it may have, and its files by the beginnings of their paths; the longest beginning counts.
PARTS = (
    ("drafting", 1500, "sam/automaton sam/drafting sam/jit"),
    ("verification", 550, "sam/verify sam/vllm/exact_sampler sam/vllm/row_classes"),
    ("switch", 600, "sam/switch"),
    ("several paths", 500, "sam/drafting/further_paths sam/vllm/paths"),
    ("trained drafters", 1150, "sam/trained_drafter sam/vllm/trained sam_recipe/draft_model"),
    ("second runner", 900, "sam/vllm/v2"),
    ("vLLM plugin", 2000, "sam/vllm sam/config sam/log sam/reading"),
    ("sharing", 650, "sam/sharing sam_recipe/launch/sharing"),
    ("history", 320, "sam/history"),
    ("routing", 700, "sam/routing sam_recipe/launch/routing sam_recipe/rollout/router"),
    ("simulator", 900, "sam/simulate sam/tune"),
    ("benches", 1500, "sam/bench sam/replay sam/profile sam/vllm/bench sam_recipe/bench"),
    ("preflight", 950, "sam_recipe/preflight sam_recipe/arguments"),
    ("launch", 950, "sam_recipe/launch sam_recipe/main_dapo sam_recipe/patch"),
    # 1,150, and 600 for verl's own scripts.
    ("trainer, rollout, records", 1750, "sam_recipe/trainer sam_recipe/rollout sam_recipe/record sam_recipe/verl_plug "
     "sam/record"),
    ("report", 700, "sam_recipe/report sam/page sam/command sam_recipe/command_line"),
    ("models and data", 1350, "sam_recipe/tiny sam_recipe/smollm2 sam_recipe/data sam_recipe/__init__ sam/__init__"),
)  # fmt: skip


def tracked(folder: str) -> list[str]:
    """Files of Python below a folder, as git knows them."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


def part_of(path: str) -> str | None:
    """The part that a file belongs to."""
    fitting = [(len(begin), part) for part, _, begins in PARTS for begin in begins.split() if path.startswith(begin)]
    return max(fitting)[1] if fitting else None


def lines_of(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def commands() -> list[str]:
    """Those of `sam`, and further modules that are made to be run."""
    own = [name for folder in ("sam", "sam_recipe") for name in tracked(folder)]
    run = [name for name in own if '\nif __name__ == "__main__":' in (ROOT / name).read_text()]
    of_sam = {module.replace(".", "/") + ".py" for module, _ in COMMANDS.values()}
    return [*COMMANDS, *(name for name in run if name not in of_sam and name != "sam_recipe/command_line.py")]


def rows_of(page: str) -> int:
    """Rows of a page's tables that tell of one name."""
    return len(re.findall(r"^\| `", (ROOT / "docs" / page).read_text(), re.MULTILINE))


def table() -> str:
    """Lines to print."""
    files = {name: lines_of(name) for folder in ("sam", "sam_recipe") for name in tracked(folder)}
    lines = [f"{'part':28}{'lines':>8}{'decided':>9}{'files':>7}"]
    for part, decided, _ in PARTS:
        own = [count for name, count in files.items() if part_of(name) == part]
        lines.append(f"{part:28}{sum(own):8,}{decided:9,}{len(own):7}")
    lines.append(f"{'sum':28}{sum(files.values()):8,}{LIMIT:9,}{len(files):7}")
    tests = tracked("tests")
    lines.append(f"{'tests':28}{sum(map(lines_of, tests)):8,}{12000:9,}{len(tests):7}")
    lines.append(f"commands {len(commands())}, knobs {rows_of('knobs.md')}, metrics {rows_of('metrics.md')}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
