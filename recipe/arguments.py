"""`python -m recipe.arguments ARGUMENTS`: a run's arguments, looked at before anything is installed.

With Python's standard library alone, so that the run scripts answer `--help` and a typing mistake at once. What needs
verl's own config (a key in the wrong place, most values) `recipe.launch.config` finds later.
"""

import argparse
import difflib
import sys
from pathlib import Path

from sam.command import Parser
from sam.config import CHOICES

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NAMES_FILE = CONFIGS / "names.txt"  # of all keys, verl's too; `python -m tests.recipe.test_arguments` writes it
# Sections whose keys other programs define: what Hydra's `+` may add to.
FREE_SECTIONS = (
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.fsdp_config",
    "data.apply_chat_template_kwargs",
    "ray_kwargs.ray_init",
    "reward.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
    "custom_reward_function.reward_kwargs",
    "trainer.v1.sampler.sampler_kwargs",
    "speculation",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a run; ends the process after --help and wrong ones."""
    parser = Parser(
        prog="sam run",
        description="One DAPO run.",
        epilog="The screen shows a line of progress and, at the end, how the run ended. All output of verl, vLLM and "
        "Ray is appended to train.log in run_dir.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-name", required=True, help="a file of configs/ without .yaml")
    parser.add_argument("--verbose", action="store_true", help="show train.log on the screen, in place of the progress")
    parser.add_argument("--check", action="store_true", help="check config and machine only, before assets are built")
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on although changed settings make another curve"
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    return parser.parse_intermixed_args(arguments)  # --verbose among overrides too


def misspelt(overrides: list[str]) -> str | None:
    """What is wrong with the first override that has a form, a choice or a name that there is not."""
    names = set(NAMES_FILE.read_text().split())
    return next((said for one in overrides if (said := _mistake(one, names))), None)


def _mistake(override: str, names: set[str]) -> str | None:
    key, equals, value = override.partition("=")
    if not equals and not override.startswith("~"):
        return f"{override}: expected KEY=VALUE, such as speculation=off"
    key, value = key.lstrip("+~").partition("@")[0], value.strip("'\"")
    if (CONFIGS / key).is_dir() and key != "shared":
        return _unknown_choice(key, value, {path.stem for path in (CONFIGS / key).glob("*.yaml")} - {"knobs"})
    section, _, name = key.partition(".")
    if section == "speculation":
        if name in CHOICES and value.isalpha() and value not in ("true", "false"):
            return _unknown_choice(key, value, set(CHOICES[name]))
    elif section == "hydra" or key.startswith(FREE_SECTIONS):
        return None
    for number, part in enumerate(parts := key.split(".")):
        if part not in names:
            close = difflib.get_close_matches(part, names, 1)
            meant = ".".join([*parts[:number], *close, *parts[number + 1 :]])
            return f"{key} does not exist: " + (f"did you mean {meant}?" if close else "check its spelling")
    return None


def _unknown_choice(key: str, value: str, choices: set[str]) -> str | None:
    known = value in choices or not value or "$" in value
    return None if known else f"{key}={value} is unknown: expected one of {', '.join(sorted(choices))}"


def main() -> int:
    if said := misspelt(parse(None).overrides):
        print(f"error: {said} [config.override]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
