"""How this project replaces attributes of other packages: only those that stand in `REGISTRY`, with cause and end.

The entries stand beside the code that needs them: sam/jit.py has numba's, sam/vllm/patches.py those of vLLM and
vllm-ascend, recipe/sam_dapo/patches_of_verl.py those of verl, Ray and torch. `sam doctor --patches` prints all, as a
list to go through when a version changes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """What is replaced and why."""

    owner: str  # a package's class or module; `runner` is an engine's model runner, GPUModelRunner or NPUModelRunner
    targets: str  # attributes of it
    cause: str  # why the package's own does not do, and what goes wrong with it
    can_go_when: str  # what the package has to do before


REGISTRY: dict[str, Patch] = {}


def register(patches: dict[str, Patch]) -> dict[str, Patch]:
    """Add entries to the registry; returns them. ValueError: a name is taken."""
    taken = REGISTRY.keys() & patches.keys()
    if taken:
        raise ValueError(f"{', '.join(sorted(taken))}: registered twice")
    REGISTRY.update(patches)
    return patches


def wrap(owner: Any, attribute: str, name: str, wrapper: Callable) -> None:
    """Call `wrapper(original, *arguments)` where the package calls the attribute; a second time changes nothing."""
    original = getattr(owner, attribute)
    names = getattr(original, "_sam", frozenset())  # of what is in place
    if name in names:
        return

    @functools.wraps(original, updated=())
    def wrapped(*arguments, **keywords):
        return wrapper(original, *arguments, **keywords)

    wrapped._sam = names | {name}
    put(owner, attribute, name, wrapped)


def before(owner: Any, attribute: str, name: str, action: Callable) -> None:
    """Call `action` with a method's first argument, if it is not named, beforehand."""

    def acting(original, *arguments, **keywords):
        action(*arguments[:1])
        return original(*arguments, **keywords)

    wrap(owner, attribute, name, acting)


def make_instead(door: type, name: str, choose: Callable[[type, Any], type]) -> None:
    """Make what `choose` says of the class that vLLM makes, `door` or one below it, and the VllmConfig it is given."""

    def make(_original, cls, *arguments, **keywords):
        return object.__new__(choose(cls, arguments[0] if arguments else keywords["vllm_config"]))

    wrap(door, "__new__", name, make)


def put(owner: Any, attribute: str, name: str, value: Any) -> None:
    """Replace an attribute that stands in the registry under that name. KeyError: it does not."""
    if attribute not in REGISTRY[name].targets.split():
        raise KeyError(f"{name}: replaces {REGISTRY[name].targets}, not {attribute}")
    setattr(owner, attribute, value)
