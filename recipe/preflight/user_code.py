"""Whether what users bring is there: code, as verl itself loads it, agent loops and data sources."""

from collections.abc import Callable, Iterator

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.preflight.files import column_values, data_files
from recipe.preflight.problem import Problem, did_you_mean, first_line
from recipe.trainer import reward
from recipe.user_code import AGENT, AGENT_LOOPS, CODE, TOOLS, TURNS

OWN_REWARD = f"pkg://{reward.__name__}"
OWN_SAMPLER = "pkg://recipe.trainer.dynamic_sampling"
OWN_MANAGER = "recipe.rollout.agent_loop.SeededManager"
MANAGER_CLASS = f"{AGENT}.agent_loop_manager_class"
SAMPLER = "trainer.v1.sampler.custom_sampler.path"
CALLED = ("reward.custom_reward_function.path", "reward.reward_manager.module.path", SAMPLER)
AGENTS = ("single_turn_agent", "tool_agent")  # verl's own


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """What verl says when it loads what users bring. Imports verl and runs their files, as processes of a run do."""
    try:
        from verl.tools.function_tool import load_function_tools_from_path
        from verl.utils.dataset.rl_dataset import get_dataset_class
        from verl.utils.import_utils import import_external_libs, load_class_from_fqn, load_extern_object
    except ImportError:  # verl or a package of its is not here, which compatibility says
        return
    loads: dict[str, Callable[..., object]] = {
        **dict.fromkeys(CALLED, load_extern_object),
        "data.custom_cls.path": lambda path, name: get_dataset_class(config.data),
        MANAGER_CLASS: load_class_from_fqn,
        "actor_rollout_ref.model.external_lib": import_external_libs,
        AGENT_LOOPS: lambda path: _load_listed(path, ("name", "_target_")),
        TOOLS: lambda path: _load_listed(path, ("class_name",), "tools"),
        f"{TURNS}.function_tool_path": load_function_tools_from_path,
    }
    for key, load in loads.items():
        if not (value := OmegaConf.select(config, key)):
            continue
        name = [OmegaConf.select(config, CODE[key])] if key in CODE else []
        try:
            found = load(list(value) if isinstance(value, ListConfig) else value, *name)
            if key in CALLED and not callable(found):
                raise TypeError(f"{name[0]} is {found!r}, expected a function or class")
        except (Exception, SystemExit) as error:
            cause = error.__cause__ or error  # of verl's "Error loading module"
            said = f"{key}={value}" + "".join(f", {CODE[key]}={one}" for one in name)
            yield Problem("code.missing", f"{said}: {type(cause).__name__}: {first_line(cause)}")


def _load_listed(path: str, fields: tuple[str, ...], place: str | None = None) -> None:
    """Load the classes that a user's YAML file lists, by the last of its fields."""
    from hydra.utils import get_object

    for names in _entries(path, fields, place):
        get_object(names[-1])


def _entries(path: str, fields: tuple[str, ...], place: str | None = None) -> list[list[str]]:
    """The fields of each entry of the list in a YAML file, below the key `place` where that is given.

    Raises:
        ValueError: the file has another form, or cannot be read.
    """
    try:
        listed = OmegaConf.load(path)
        listed = listed[place] if place else listed
        if not isinstance(listed, ListConfig):
            raise ValueError("no list")
        return [[str(one[field]) for field in fields] for one in listed]
    except FileNotFoundError:
        raise
    except Exception as error:  # what YAML's parser raises has many classes
        expected = f"{place}, a list" if place else "a list"
        raise ValueError(f"expected {expected} of entries with {' and '.join(fields)} ({first_line(error)})") from None


def data_problems(config: DictConfig) -> Iterator[Problem]:
    """Agent loops and data sources that the config or its data name, and that nothing known here has."""
    if config.data.custom_cls.path:
        return  # a dataset may name others, and its file register them
    names = list(AGENTS)
    try:
        if path := OmegaConf.select(config, AGENT_LOOPS):
            names += [name for name, _ in _entries(path, ("name", "_target_"))]
    except (OSError, ValueError):
        return  # find_problems says so
    wanted = [(f"{AGENT}.default_agent_loop", OmegaConf.select(config, f"{AGENT}.default_agent_loop"))]
    for key, file in data_files(config):
        wanted += [(f"{key}={file}: agent_name", name) for name in column_values(file, "agent_name")]
        # The recipe's own reward knows some data sources; another one may know others.
        if config.reward.custom_reward_function.path == OWN_REWARD:
            for source in column_values(file, "data_source"):
                if isinstance(source, str | None) and not reward.knows(source):  # files.data_problems has other types
                    yield Problem("data.source", f"{key}={file}: data_source={source}")
    for said, name in wanted:
        if name not in names:
            remedy = did_you_mean(name, names) or f"name one of {', '.join(names)}, or add it to {AGENT_LOOPS}"
            yield Problem("code.missing", f"{said}={name}", remedy)


def find_warnings(config: DictConfig) -> Iterator[str]:
    """Which promise a part takes away that a user puts in the place of the recipe's."""
    if (path := OmegaConf.select(config, SAMPLER)) != OWN_SAMPLER:
        yield (
            f"{SAMPLER}={path}: which groups train, and in what order, is that sampler's: unless it extends "
            "DapoRounds, runs need not repeat, and rollouts/ is not written"
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
