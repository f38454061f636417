"""Whether what users bring is there: files and names in them, agent loops and data sources. None of it is run."""

import importlib.util
import symtable
import tokenize
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.preflight.files import column_values, data_files
from recipe.preflight.problem import Problem, did_you_mean, first_line
from recipe.trainer import reward
from recipe.user_code import AGENT, AGENT_LOOPS, CODE, FILES, TOOLS

PACKAGE = "pkg://"
OWN_REWARD = f"{PACKAGE}{reward.__name__}"
OWN_SAMPLER = f"{PACKAGE}recipe.trainer.dynamic_sampling"
OWN_MANAGER = "recipe.rollout.agent_loop.SeededManager"
MANAGER = "reward.reward_manager.module.path"
MANAGER_CLASS = f"{AGENT}.agent_loop_manager_class"
AGENTS = ("single_turn_agent", "tool_agent")  # verl's own
UNREADABLE = ("import *", "globals()", "__getattr__")  # only running such a file tells what it defines


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Of all that verl would look up in a process of Ray."""
    for setting, wrong in _wrong_code(config):
        yield Problem("code.missing", setting, wrong)
    for key, fields, place in ((AGENT_LOOPS, ("name", "_target_"), None), (TOOLS, ("class_name",), "tools")):
        path = OmegaConf.select(config, key)
        if path and Path(path).is_file():
            try:
                names = [[str(one[field]) for field in fields][-1] for one in _entries(path, place)]
            except Exception as error:  # what YAML's parser raises has many classes
                expected = f"{place}, a list" if place else "a list"
                wrong = f"expected {expected} of entries with {' and '.join(fields)} ({first_line(error)}): correct it"
                yield Problem("code.missing", f"{key}={path}", wrong)
                continue
            for name in names:
                if wrong := wrong_target(name):
                    yield Problem("code.missing", f"{key}={path}: {name}", wrong)
    yield from _agent_loops(config)
    # The recipe's own reward knows some data sources; another reward, or dataset, may know others.
    if config.reward.custom_reward_function.path == OWN_REWARD and not config.data.custom_cls.path:
        for key, file in data_files(config):
            for source in column_values(file, "data_source"):
                if isinstance(source, str | None) and not reward.knows(source):  # data_problems tells of other types
                    yield Problem("data.source", f"{key}={file}: data_source={source}")


def find_warnings(config: DictConfig) -> Iterator[str]:
    """Which promise a part takes away that a user puts in the place of the recipe's."""
    sampler = config.trainer.v1.sampler.custom_sampler
    if sampler.path != OWN_SAMPLER:
        yield (
            f"trainer.v1.sampler.custom_sampler.path={sampler.path}: which groups train, and in what order, is that "
            "sampler's: unless it extends DapoRounds, runs need not repeat, and rollouts/ is not written"
        )
    if (manager := OmegaConf.select(config, MANAGER_CLASS)) != OWN_MANAGER:
        yield (
            f"{MANAGER_CLASS}={manager}: without the recipe's manager responses have no seeds: runs do not repeat, nor "
            "are responses those of speculation=off"
        )
    if config.data.validation_shuffle:
        yield (
            "data.validation_shuffle=True: verl shuffles without a seed, and responses' seeds go by the order of rows: "
            "validations do not repeat"
        )


def _wrong_code(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Settings that name code, and what is wrong with them."""
    source, dataset = config.reward.reward_manager.source, config.data.custom_cls.name
    if source == "importlib" and not OmegaConf.select(config, MANAGER):
        yield f"{MANAGER}=None, reward.reward_manager.source={source}", "set both, or neither"
    if dataset and not config.data.custom_cls.path:
        yield f"data.custom_cls.path=None, data.custom_cls.name={dataset}", "set both, or neither"
    for key in FILES:
        if not (path := OmegaConf.select(config, key)):
            continue
        name_key = CODE.get(key)
        name = OmegaConf.select(config, name_key) if name_key else None
        if key == MANAGER and source != "importlib":
            wrong = "verl reads it with reward.reward_manager.source=importlib only: set that"
        elif str(path).startswith(PACKAGE):
            wrong = wrong_target(f"{str(path).removeprefix(PACKAGE).replace('/', '.')}.{name}")
        elif not Path(str(path)).is_file():
            wrong = "no such file: correct it"
        else:
            wrong = _wrong_name(Path(path), name) if name_key else None
        if wrong:
            yield f"{key}={path}" + (f", {name_key}={name}" if name_key else ""), wrong
    manager = OmegaConf.select(config, MANAGER_CLASS)
    if manager and (wrong := wrong_target(str(manager))):
        yield f"{MANAGER_CLASS}={manager}", wrong
    for module in [libs] if isinstance(libs := config.actor_rollout_ref.model.external_lib, str) else libs or []:
        if _find_spec(module.split(".")) is None:
            yield f"actor_rollout_ref.model.external_lib={module}", "correct it, or set PYTHONPATH"


def wrong_target(dotted: str) -> str | None:
    """What is wrong with the name of a class or function, of which no module is imported."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):  # the longest module in it
        if spec := _find_spec(parts[:end]):
            is_python = spec.origin is not None and spec.origin.endswith(".py")
            return _wrong_name(Path(spec.origin), parts[end]) if is_python else None
    return f"no module {parts[0] if len(parts) < 3 else '.'.join(parts[:-1])} here: correct it, or set PYTHONPATH"


def _find_spec(parts: list[str]) -> ModuleSpec | None:
    """importlib.util.find_spec imports the packages above a module."""
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    for end in range(2, len(parts) + 1):
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(".".join(parts[:end]), list(folders)) if folders else None
    return spec


def _wrong_name(path: Path, name: str | None) -> str | None:
    try:
        with tokenize.open(path) as file:  # in the encoding that Python reads it in
            text = file.read()
        table = symtable.symtable(text, str(path), "exec")
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}: correct it"
    except (OSError, ValueError) as error:
        return f"{first_line(error)}: correct it"
    known = [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    if name in known or any(sign in text for sign in UNREADABLE):
        return None
    return f"{path} defines no {name}: {did_you_mean(name, known) or 'name one that it defines'}"


def _entries(path: str, place: str | None) -> Any:
    """The list in a user's YAML file, below the key `place` where that is given."""
    listed = OmegaConf.load(path)
    listed = listed[place] if place else listed
    if not isinstance(listed, ListConfig):
        raise ValueError("no list")
    return listed


def _agent_loops(config: DictConfig) -> Iterator[Problem]:
    """Whether the default agent loop, and those that data name, are verl's or of the file of agent loops."""
    path, names = OmegaConf.select(config, AGENT_LOOPS), list(AGENTS)
    try:
        names += [one["name"] for one in _entries(path, None)] if path else []
    except Exception:
        return  # find_problems says so
    if config.data.custom_cls.path:
        return  # a dataset may name others, and its file register them
    wanted = [(f"{AGENT}.default_agent_loop", OmegaConf.select(config, f"{AGENT}.default_agent_loop"))]
    for key, file in data_files(config):
        wanted += [(f"{key}={file}: agent_name", name) for name in column_values(file, "agent_name")]
    for said, name in wanted:
        if name not in names:
            remedy = did_you_mean(name, names) or f"name one of {', '.join(names)}, or add it to {AGENT_LOOPS}"
            yield Problem("agent_loop.unknown", f"{said}={name}", remedy)
