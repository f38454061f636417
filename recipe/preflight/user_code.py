"""Whether what users bring is there: files and names in them, agent loops and data sources. None of it is run."""

import importlib.util
import symtable
import tokenize
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.preflight.problem import Problem, first_line, meant
from recipe.trainer import reward
from recipe.user_code import AGENT, AGENT_LOOPS, CODE, FILES, TOOLS

PACKAGE = "pkg://"
OWN_REWARD = f"{PACKAGE}{reward.__name__}"
OWN_SAMPLER = f"{PACKAGE}recipe.trainer.dynamic_sampling"
OWN_MANAGER = "recipe.rollout.agent_loop.SeededManager"
MANAGER = "reward.reward_manager.module.path"
AGENTS = ("single_turn_agent", "tool_agent")  # verl's own
UNREADABLE = ("import *", "globals()", "__getattr__")  # only running such a file tells what it defines


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """Of all that verl would look up in a process of Ray."""
    for key in FILES:
        if not (path := OmegaConf.select(config, key)):
            if wrong := _needs_file(key, config):
                yield Problem("code.missing", f"{key}={path}, {wrong}", "set both, or neither")
        else:
            name_key = CODE.get(key)
            name = OmegaConf.select(config, name_key) if name_key else None
            wrong = _wrong_code(str(path), name, bool(name_key))
            if key == MANAGER and config.reward.reward_manager.source != "importlib":
                wrong = "verl reads it with reward.reward_manager.source=importlib only: set that"
            if wrong:
                yield Problem("code.missing", f"{key}={path}" + (f", {name_key}={name}" if name_key else ""), wrong)
    manager = OmegaConf.select(config, f"{AGENT}.agent_loop_manager_class")
    if manager and (wrong := wrong_target(str(manager))):
        yield Problem("code.missing", f"{AGENT}.agent_loop_manager_class={manager}", wrong)
    for module in [libs] if isinstance(libs := config.actor_rollout_ref.model.external_lib, str) else libs or []:
        if _find_spec(module.split(".")) is None:
            key = "actor_rollout_ref.model.external_lib"
            yield Problem("code.missing", f"{key}={module}", "correct it, or set PYTHONPATH")
    yield from _agent_loops(config)
    yield from _tools(config)
    yield from _columns(config, to_be_built)


def _needs_file(key: str, config: DictConfig) -> str | None:
    """A setting that has no effect without the file that is not given."""
    source, name = config.reward.reward_manager.source, config.data.custom_cls.name
    needing = {MANAGER: source == "importlib" and f"reward.reward_manager.source={source}"}
    return (needing | {"data.custom_cls.path": name and f"data.custom_cls.name={name}"}).get(key) or None


def find_warnings(config: DictConfig) -> Iterator[str]:
    """Which promise a part takes away that a user puts in the place of the recipe's."""
    sampler = config.trainer.v1.sampler.custom_sampler
    if sampler.path != OWN_SAMPLER:
        yield (
            f"trainer.v1.sampler.custom_sampler.path={sampler.path}: which groups train, and in what order, is that "
            "sampler's: unless it extends DapoRounds, runs need not repeat, and rollouts/ is not written"
        )
    if (manager := OmegaConf.select(config, f"{AGENT}.agent_loop_manager_class")) != OWN_MANAGER:
        yield (
            f"{AGENT}.agent_loop_manager_class={manager}: without the recipe's manager responses have no seeds: runs "
            "do not repeat, nor are responses those of speculation=off"
        )
    if config.data.validation_shuffle:
        yield (
            "data.validation_shuffle=True: verl shuffles without a seed, and responses' seeds go by the order of rows: "
            "validations do not repeat"
        )


def _wrong_code(path: str, name: str | None, is_python: bool) -> str | None:
    """What is wrong with a file, or a module after pkg://, in which `name` is looked up."""
    if path.startswith(PACKAGE):
        return wrong_target(f"{path.removeprefix(PACKAGE).replace('/', '.')}.{name}")
    if not Path(path).is_file():
        return "no such file: correct it"
    return _wrong_name(Path(path), name) if is_python else None


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
    return f"{path} defines no {name}: {meant(name, known) or 'name one that it defines'}"


def _agent_loops(config: DictConfig) -> Iterator[Problem]:
    """What the file of agent loops names, and whether the default one is among them."""
    path, names = OmegaConf.select(config, AGENT_LOOPS), list(AGENTS)
    if path and Path(path).is_file():
        try:
            listed = OmegaConf.load(path)
            if not isinstance(listed, ListConfig) or not all("name" in one and "_target_" in one for one in listed):
                raise ValueError("expected a list of entries with name and _target_")
        except Exception as error:  # what YAML's parser raises has many classes
            yield Problem("code.missing", f"{AGENT_LOOPS}={path}", f"{first_line(error)}: correct it")
            return
        for one in listed:
            names.append(one.name)
            if wrong := wrong_target(str(one["_target_"])):
                yield Problem("code.missing", f"{AGENT_LOOPS}={path}: {one['_target_']}", wrong)
    if config.data.custom_cls.path or (path and not Path(path).is_file()):
        return  # a dataset may name others, and its file register them
    wanted = [(f"{AGENT}.default_agent_loop", OmegaConf.select(config, f"{AGENT}.default_agent_loop"))]
    for key, file in _data_files(config, None):
        wanted += [(f"data.{key}={file}: agent_name", name) for name in _values(file, "agent_name")]
    for said, name in wanted:
        if name not in names:
            remedy = meant(name, names) or f"name one of {', '.join(names)}, or add it to a file of {AGENT_LOOPS}"
            yield Problem("agent_loop.unknown", f"{said}={name}", remedy)


def _tools(config: DictConfig) -> Iterator[Problem]:
    path = OmegaConf.select(config, TOOLS)
    if path and Path(path).is_file():
        try:
            named = [str(tool["class_name"]) for tool in OmegaConf.load(path)["tools"]]
        except Exception:
            expected = "expected tools, a list of entries with class_name: correct it"
            yield Problem("code.missing", f"{TOOLS}={path}", expected)
            return
        for name in named:
            if wrong := wrong_target(name):
                yield Problem("code.missing", f"{TOOLS}={path}: {name}", wrong)


def _columns(config: DictConfig, to_be_built: Path | None) -> Iterator[Problem]:
    """Data sources that the recipe's own reward does not know; another reward, or dataset, may."""
    if config.reward.custom_reward_function.path != OWN_REWARD or config.data.custom_cls.path:
        return
    for key, file in _data_files(config, to_be_built):
        for source in _values(file, "data_source"):
            if isinstance(source, str | None) and not reward.knows(source):  # files tells of other types
                yield Problem("data.source", f"data.{key}={file}: data_source={source}")


def _data_files(config: DictConfig, to_be_built: Path | None) -> Iterator[tuple[str, Path]]:
    for key in ("train_files", "val_files"):
        for name in value if isinstance(value := config.data[key], ListConfig) else [value]:
            path = Path(str(name)).expanduser()  # null too, of which another check tells
            if to_be_built is None or to_be_built.absolute() not in path.absolute().parents:
                yield key, path


def _values(path: Path, column: str) -> list[str]:
    """Different values of a column; none of a file that cannot be read, of which another check tells."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        return file.read([column])[column].unique().to_pylist() if column in file.schema_arrow.names else []
    except (OSError, ValueError):
        return []
