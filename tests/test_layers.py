"""The house: who may import whom. Read off the imports of every file.

A room may import rooms above it in its list, and its own. `sam` imports neither verl nor sam_recipe, and of `sam` only
`sam.vllm` imports vLLM.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lowest first. A room is a folder, or a file that lies beside the folders.
SAM = (
    ("jit", "reading"),
    ("trained_drafter",),
    ("config", "configs", "command", "page", "log"),
    ("automaton", "verify", "record", "routing"),
    ("drafting",),
    ("switch", "history", "sharing"),
    ("vllm",),
    ("replay",),
    ("simulate",),
    ("profile", "bench", "tune"),
)
RECIPE = (
    ("arguments", "patch"),
    ("tiny.task", "tiny.tokenizer", "tiny.platform", "smollm2.task", "smollm2.model"),
    ("record", "tiny.model"),
    ("launch",),
    ("tiny.warm_start", "data"),
    ("tiny.assets", "smollm2.assets", "draft_model"),
    ("rollout",),
    ("verl_plugin",),
    ("preflight",),
    ("trainer",),
    ("report",),
    ("main_dapo",),
    ("bench",),
    ("command_line",),
)


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


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


def room_of(module: str, floors: dict[str, int]) -> str | None:
    return max((room for room in floors if f"{module}.".startswith(f"{room}.")), key=len, default=None)


@pytest.mark.parametrize(("package", "order"), [("sam", SAM), ("sam_recipe", RECIPE)])
def test_no_import_runs_upwards_nor_in_a_circle(package, order):
    floors = {f"{package}.{room}": floor for floor, rooms in enumerate(order) for room in rooms}
    graph = {module_of(path): imports_of(path) for path in files(package)}
    for module, imported in graph.items():
        if here := room_of(module, floors):
            for there in {room_of(name, floors) for name in imported} - {None, here}:
                assert floors[there] < floors[here], f"{module} imports {there}, which is not below it"
        else:
            assert "." not in module or module.endswith((".tiny", ".smollm2")), f"{module} has no floor: give it one"
        if package == "sam":
            outside = {name.split(".")[0] for name in imported} & {"verl", "sam_recipe", "vllm", "vllm_ascend"}
            assert outside <= ({"vllm", "vllm_ascend"} if here == "sam.vllm" else set()), (module, outside)
    graphlib.TopologicalSorter({one: (graph[one] & graph.keys()) - {one} for one in graph}).prepare()


# Of lines in a file and in a function, parameters of a function, attributes that a class sets. Kernels are called with
# arrays alone, in any number.
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS, MOST_ATTRIBUTES = 500, 60, 6, 12
LARGER = {
    "sam/history/client.py: HistoryClient: 13 attributes": "the queues to and from its threads are among them",
    "sam/simulate/rollout.py: Replica: 14 attributes": "a replica's whole state",
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
            is_kernel = any(re.search("compiled|kernel", ast.unparse(one)) for one in node.decorator_list)
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
    paths = files("sam") + files("sam_recipe")
    assert {f"{path.relative_to(ROOT)}: {size}" for path in paths for size in sizes(path)} == LARGER.keys()


def test_what_is_replaced_of_vllm_stands_in_one_list():
    """No file assigns to what the list names of another object. Those of sam/vllm/bench follow an engine that is
    measured; hooks.py sets an attribute of a step's output."""
    from sam.vllm.patches import PATCHES

    names = "|".join({name for patch in PATCHES.values() for name in patch.targets.split()})
    replaces = re.compile(rf"^ *(?!self\.)[\w.]+\.({names})(, .*)? = |\bsetattr\(|\bfunctools\.wraps\(", re.M)
    paths = [path for path in files("sam/vllm") if path.parent.name != "bench"]
    assert {path.name for path in paths if replaces.search(path.read_text())} == {"patches.py", "hooks.py"}
