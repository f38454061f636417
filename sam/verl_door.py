"""Load verl's plugin of the recipe (entry point `verl.plugins`), or say what hides the recipe.

verl passes over a plugin that cannot be imported without a word: a run with drafts would go on without them.
"""

import importlib
import sys

from sam.command import what_hides_the_recipe

PLUGIN = "recipe.sam_dapo.verl_plugin"


def refuse(*_words: str) -> None:
    """End a run that asks for speculation, `${sam:...}`, with one line."""
    print(f"error: {what_hides_the_recipe()}", file=sys.stderr)
    sys.exit(2)


if what_hides_the_recipe() is None:
    importlib.import_module(PLUGIN)
else:  # runs without speculation are not concerned
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("sam", refuse, replace=True)
    if any(word.lstrip("+").startswith("speculation=") for word in sys.argv[1:]):
        refuse()  # before Ray starts
