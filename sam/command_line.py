"""`sam COMMAND ...`: every command of this project under one name; or `python -m sam.command_line COMMAND`.

It lies in `sam`, so that it can say which folder hides the recipe.
"""

import difflib
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version

from sam.command import what_hides_the_recipe

# Name: the module whose `main` it calls, and what it is for. No module is imported but that of the command called.
COMMANDS = {
    "run": ("recipe.sam_dapo.main_dapo", "train with verl; scripts/run_dapo_*.sh do so with all that it needs"),
    "doctor": ("recipe.sam_dapo.preflight.__main__", "check a config and this machine before a run"),
    "bench": ("recipe.sam_dapo.bench", "measure engines beside stock vLLM, or whole runs"),
    "replay": ("sam.tools.replay", "draft for recorded text, without an engine"),
    "profile": ("sam.tools.profile", "fit what engine steps cost to recorded runs, for policy=goodput"),
    "tune": ("sam.tools.tune", "recommend settings from a run, or simulate a set-up"),
    "report": ("recipe.sam_dapo.report.page", "write the page that compares runs"),
    "data": ("recipe.sam_dapo.data", "get the published datasets, in verl's format"),
    "distil": ("recipe.sam_dapo.draft_model", "train a draft model for a model"),
}
HELP = ("-h", "--help")
VERSION = ("-V", "--version")
PACKAGES = ("sam-rollout", "verl", "vllm", "torch")


def usage() -> str:
    """The table of commands."""
    rows = (f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return "\n".join(("usage: sam COMMAND ...    sam COMMAND --help says more", "", *rows))


def versions() -> str:
    """The versions of this project and of what it works in."""
    lines = []
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} not installed")
    return ", ".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Call the command that the first argument names with the others; returns its exit code."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or [""]
    if not name or name in HELP:
        print(usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name in VERSION:
        print(versions())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"error: sam {name}: no such command; {meant}", file=sys.stderr)
        return 2
    module, _purpose = COMMANDS[name]
    hiding = what_hides_the_recipe() if module.startswith("recipe.") else None
    if hiding:
        print(f"error: sam {name}: {hiding}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(module).main(words)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("sam", "recipe"):
            raise
        print(f"error: sam {name}: {error.name} is not installed: install the extra `cpu` or `cuda`", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
