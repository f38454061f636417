"""The house: who may import or name whom. Read off the imports of every file, and off the YAML.

A room may import rooms above it in its list, and its own. `sam` imports neither verl nor the recipe, and
of `sam` only `sam.vllm` imports vLLM.
"""

import ast
import graphlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.sam_dapo.launch.config import verl_configs
from tests import density

ROOT = Path(__file__).parents[1]
# Lowest first. A room is a folder, or a file that lies beside the folders.
SAM = (
    ("patching",),
    ("guard", "jit", "reading"),
    ("trained_drafter",),
    ("config", "configs", "command", "log"),
    ("command_line", "verl_door"),
    ("automaton", "verify", "record", "routing"),
    ("drafting",),
    ("switch", "history", "sharing"),
    ("engine",),
    ("vllm",),
    ("tools.page", "tools.peers"),
    ("tools.replay",),
    ("tools.simulate",),
    ("tools.profile", "tools.bench", "tools.tune"),
    ("bench",),
)
WITHOUT_FLOOR = ("sam.tools", "recipe.sam_dapo.tiny", "recipe.sam_dapo.smollm2")  # their rooms have one each
RECIPE = (
    ("arguments", "patch", "patches_of_verl"),
    ("tiny.task", "tiny.tokenizer", "tiny.platform", "smollm2.task", "smollm2.model"),
    ("record", "tiny.model"),
    ("launch", "assets"),
    ("tiny.warm_start", "data"),
    ("tiny.shipped",),
    ("tiny.assets", "smollm2.assets", "draft_model"),
    ("tiny.ship",),
    ("rollout",),
    ("verl_plugin",),
    ("preflight",),
    ("trainer",),
    ("report",),
    ("main_dapo",),
    ("bench",),
)


def files(package: str) -> list[Path]:
    return sorted((ROOT / package.replace(".", "/")).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                place = ROOT / node.module.replace(".", "/") / alias.name
                is_module = place.with_suffix(".py").is_file() or place.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def configs_of(root: Path) -> Iterator[Path]:
    """The YAML files of a folder that Hydra searches, with those behind links."""
    for folder, _, names in os.walk(root, followlinks=True):
        yield from (Path(folder, name) for name in names if name.endswith(".yaml"))


def test_a_config_names_nothing_above_it_and_is_there_once():
    """Hydra takes the first file of a name on its search path, and says nothing of another."""
    for path in configs_of(ROOT / "sam"):
        assert not re.search(r"\b(recipe|verl)[./]", path.read_text()), f"{path} names what is above it"
    roots = (ROOT / "configs", ROOT / "sam" / "configs", Path(verl_configs().removeprefix("file://")))
    counts = Counter(path.relative_to(root) for root in roots for path in configs_of(root))
    assert max(counts.values()) == 1, counts.most_common(3)


def room_of(module: str, floors: dict[str, int]) -> str | None:
    return max((room for room in floors if f"{module}.".startswith(f"{room}.")), key=len, default=None)


@pytest.mark.parametrize(("package", "order"), [("sam", SAM), ("recipe.sam_dapo", RECIPE)])
def test_no_import_runs_upwards_nor_in_a_circle(package, order):
    floors = {f"{package}.{room}": floor for floor, rooms in enumerate(order) for room in rooms}
    graph = {module_of(path): imports_of(path) for path in files(package)}
    for module, imported in graph.items():
        if here := room_of(module, floors):
            for there in {room_of(name, floors) for name in imported} - {None, here}:
                assert floors[there] < floors[here], f"{module} imports {there}, which is not below it"
        else:
            assert module in {package, *WITHOUT_FLOOR}, f"{module} has no floor: give it one"
        if package == "sam":
            outside = {name.split(".")[0] for name in imported} & {"verl", "recipe", "vllm", "vllm_ascend"}
            assert outside <= ({"vllm", "vllm_ascend"} if here == "sam.vllm" else set()), (module, outside)
    graphlib.TopologicalSorter({one: (graph[one] & graph.keys()) - {one} for one in graph}).prepare()


# Of lines in a file and in a function, parameters of a function, attributes that a class sets. Kernels are called with
# arrays alone, in any number.
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS, MOST_ATTRIBUTES = 500, 60, 6, 12
LARGER = {
    "sam/history/client.py: HistoryClient: 13 attributes": "the queues to and from its threads are among them",
    "sam/tools/simulate/rollout.py: SimulatedReplica: 14 attributes": "a replica's whole state",
    "sam/verify/rejection.py: rejection_sample: 8 parameters": "vLLM's signature",
    "sam/vllm/ascend/__init__.py: expand_triton: 7 parameters": "vllm-ascend's signature",
}


def sizes(path: Path) -> Iterator[str]:
    """What of a file is larger than a reader should meet."""
    text = path.read_text()
    if (lines := len(text.splitlines())) > MOST_LINES:
        yield f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = len({*given} - {"self", "cls"})
            is_kernel = any(re.search("compiled|kernel|triton", ast.unparse(one)) for one in node.decorator_list)
            if parameters > MOST_PARAMETERS and not is_kernel:
                yield f"{node.name}: {parameters} parameters"
            if (lines := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_FUNCTION:
                yield f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ClassDef):
            stored = [
                one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            ]
            attributes = {one.attr for one in stored if ast.unparse(one.value) == "self"}
            if len(attributes) > MOST_ATTRIBUTES:
                yield f"{node.name}: {len(attributes)} attributes"


def test_nothing_is_larger_than_a_reader_should_meet():
    paths = files("sam") + files("recipe")
    assert {f"{path.relative_to(ROOT)}: {size}" for path in paths for size in sizes(path)} == LARGER.keys()


def test_a_line_says_one_thing():
    assert not density.dense_places()


def test_a_name_says_what_is_meant():
    assert not density.vague_names()


def test_what_is_caught_is_named_or_has_its_reason_beside_it():
    assert not density.broad_catches()


def test_what_is_replaced_stands_in_one_registry():
    """No file assigns to what the registry names of another object: sam/patching.py does, by the entry's name."""
    from recipe.sam_dapo import patches_of_verl, verl_plugin  # noqa: F401 - register theirs
    from sam import jit  # noqa: F401
    from sam.patching import REGISTRY
    from sam.vllm import patches  # noqa: F401

    names = "|".join({name for patch in REGISTRY.values() for name in patch.targets.split()})
    replaces = re.compile(rf"^ *(?!self\.)[\w.]+\.({names})(, .*)? = |\bsetattr\(|\bfunctools\.wraps\(", re.M)
    temporary = re.compile(r'mock\.patch\.object\(\w+, "(\w+)"')
    texts = {path.relative_to(ROOT): path.read_text() for path in files("sam") + files("recipe")}
    assert {str(path) for path, text in texts.items() if replaces.search(text)} - ASSIGNING == {"sam/patching.py"}
    assert {name for text in texts.values() for name in temporary.findall(text)} <= {*names.split("|")}


# Files that set attributes of objects of their own, by name or by a name of the registry.
ASSIGNING = {
    "recipe/sam_dapo/rollout/agent_loop.py",
    "sam/tools/bench/settings.py",
    "sam/record/engine_steps.py",
    "sam/switch/step_cost.py",
    "sam/vllm/bench/engine.py",
    "sam/vllm/bench/prompt_lookup.py",
    "sam/vllm/hooks.py",
}
