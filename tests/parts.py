"""`python -m tests.parts`: how large this project is, by part: lines and files of Python, beside the lines decided.

And the commands, knobs and metrics that a user meets. scripts/test.sh prints it, so that CI shows it.
"""

import re
import subprocess
from pathlib import Path

from sam_recipe.command_line import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 17500  # 16,000, 900 for the second runner, 600 for verl's own scripts
LIMIT_OF_TESTS = 12000
# Part, the lines that it may have, and its files by the beginnings of their paths; the longest beginning counts.
PARTS = (
    ("drafting", 1500, "sam/automaton sam/drafting sam/jit"),
    ("verification", 550, "sam/verify sam/vllm/exact_sampler sam/vllm/cpu_linear"),
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


def tracked(folder: str) -> dict[str, str]:
    """Files of Python below a folder, as git knows them, and their texts."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: (ROOT / name).read_text() for name in listed.stdout.split() if (ROOT / name).exists()}


def part_of(path: str) -> str | None:
    """The part that a file belongs to."""
    fitting = [(len(begin), part) for part, _, begins in PARTS for begin in begins.split() if path.startswith(begin)]
    return max(fitting)[1] if fitting else None


def commands(files: dict[str, str]) -> list[str]:
    """Those of `sam`, and further modules that are made to be run."""
    of_sam = {"sam_recipe/command_line.py", *(f"{module.replace('.', '/')}.py" for module, _ in COMMANDS.values())}
    run = [name for name, text in files.items() if '\nif __name__ == "__main__":' in text]
    return [*COMMANDS, *(name for name in run if name not in of_sam)]


def table() -> str:
    """Lines to print."""
    own, tests = tracked("sam") | tracked("sam_recipe"), tracked("tests")
    by_part = {part: [text for name, text in own.items() if part_of(name) == part] for part, *_ in PARTS}
    rows = [(part, by_part[part], decided) for part, decided, _ in PARTS]
    rows += [("sum", [*own.values()], LIMIT), ("tests", [*tests.values()], LIMIT_OF_TESTS)]
    lines = [f"{'part':28}{'lines':>8}{'decided':>9}{'files':>7}"]
    for part, texts, decided in rows:
        count = sum(len(text.splitlines()) for text in texts)
        lines.append(f"{part:28}{count:8,}{decided:9,}{len(texts):7}")
    # Rows of a page's tables that tell of one name.
    pages = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("knobs", "metrics"))
    knobs, metrics = (len(re.findall(r"^\| `", page, re.MULTILINE)) for page in pages)
    return "\n".join([*lines, f"commands {len(commands(own))}, knobs {knobs}, metrics {metrics}"])


if __name__ == "__main__":
    print(table())
