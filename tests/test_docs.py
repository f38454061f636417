"""README and docs/ say what is there: commands, flags, overrides, links, images, paths, names and metrics."""

import ast
import functools
import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.test_layers import RECIPE, SAM

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
# CHANGELOG names what is gone, too.
PRESENT = {name: text for name, text in TEXTS.items() if name != "CHANGELOG.md"}

# Commands that need a cluster, a device, a container engine or another network: no test runs them.
CLUSTER_ONLY = {
    "docker",
    "npu-smi",
    "pip",
    "source",
    "bash scripts/start_ray_cluster.sh",
    "bash scripts/run_dapo_qwen3_8b_cuda.sh",
}
SHELL_WORDS = {"export", "unset"}


def commands_of(text: str) -> list[list[str]]:
    """Commands in code blocks and in inline code, as words; comments, variables before them and pipes left out."""
    lines = []
    for block in re.findall(r"^[ ]*```bash\n(.*?)^[ ]*```", text, flags=re.M | re.S):
        lines += block.replace("\\\n", " ").splitlines()
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
    lines += [" ".join(code.split()) for code in inline if re.match(r"(python (-m|scripts|docs)|bash scripts)", code)]
    found = []
    for line in lines:
        for part in re.split(r"\s&&\s|;", line):
            words = shlex.split(re.sub(r"\$\(.*?\)", "X", part), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and words[0] not in SHELL_WORDS:
                found.append(words)
    return found


COMMANDS = sorted({(page, *words) for page, text in TEXTS.items() for words in commands_of(text)})
PRESENT_COMMANDS = [(page, *words) for page, *words in COMMANDS if page in PRESENT]


def is_cluster_only(words) -> bool:
    return words[0] in CLUSTER_ONLY or " ".join(words[:2]) in CLUSTER_ONLY


def program_of(words) -> tuple[Path, str]:
    """File of the program that a command starts, and the name under which a test would start it."""
    if words[:2] == ("python", "-m"):
        path = ROOT / words[2].replace(".", "/")
        return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")), words[2]
    return ROOT / words[1], Path(words[1]).name


def test_commands_are_found():
    assert len(PRESENT_COMMANDS) > 30
    assert ("README.md", "bash", "scripts/quickstart.sh") in COMMANDS


def test_every_program_exists_and_is_run_by_a_test():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page, *words in PRESENT_COMMANDS:
        if is_cluster_only(tuple(words)) or words[2:3] == ["pytest"]:
            continue
        path, name = program_of(tuple(words))
        assert path.is_file(), f"{page}: {' '.join(words)}: no {path.relative_to(ROOT)}"
        folder, _, module = name.rpartition(".")
        imported = f"from {folder} import" in tests and module in tests
        assert name in tests or imported, f"{page}: no test runs {name}: {' '.join(words)}"


@functools.cache
def flags_of(path: Path) -> set[str]:
    """Flags and choices that a program's parser knows, from its source and, of a package, from its folder."""
    files = list(path.parent.glob("*.py") if path.name == "__main__.py" else [path])
    for module in re.findall(r"^from ([\w.]+) import (?:main|parse)", path.read_text(), flags=re.M):
        files.append(ROOT / (module.replace(".", "/") + ".py"))
    known = {"--help", "-h"}
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            known |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return known | {f"--no-{flag[2:]}" for flag in known}


@functools.cache
def flags_of_vllm() -> set[str]:
    """Flags of vLLM's engine arguments, which sam.bench hands on, read without importing vLLM."""
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (arguments,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == "EngineArgs"]
    names = [node.target.id.replace("_", "-") for node in arguments.body if isinstance(node, ast.AnnAssign)]
    return {f"--{prefix}{name}" for name in names for prefix in ("", "no-")}


def test_every_flag_is_known_to_its_parser():
    for page, *words in PRESENT_COMMANDS:
        if words[0] != "python" or words[2:3] == ["pytest"]:
            continue
        path, name = program_of(tuple(words))
        for flag in (word for word in words[2:] if re.match(r"--?[a-z]", word) and word != "-m"):
            known = flags_of(path) | (flags_of_vllm() if name == "sam.bench" else set())
            assert flag.partition("=")[0] in known, f"{page}: {name} does not know {flag}"


def overrides_of(words) -> tuple[str, tuple[str, ...]] | None:
    """Config and Hydra overrides of a command that takes them."""
    if words[:2] == ("python", "-m") and words[2] in ("recipe.main_dapo", "recipe.preflight"):
        name = words[words.index("--config-name") + 1] if "--config-name" in words else "dapo_tiny_cpu"
    elif words[0] == "bash" and (script := re.match(r"scripts/run_(\w+)\.sh", words[1])):
        name = script[1]
    elif words[:2] == ("bash", "scripts/quickstart.sh"):
        name = "dapo_tiny_cpu"
    else:
        return None
    return name, tuple(word for word in words[2:] if re.match(r"[a-z_.]+=", word))


def overrides_by_config() -> list[tuple[str, tuple[str, ...]]]:
    """All documented overrides, those of one config together as far as no key comes twice: composing takes seconds."""
    merged: list[tuple[str, dict[str, str]]] = []
    for name, words in sorted({found for _, *words in PRESENT_COMMANDS if (found := overrides_of(tuple(words)))}):
        new = dict(word.split("=", 1) for word in words)
        for key in ("run_dir", "speculation.step_cost", "speculation.corpus"):  # paths that a reader puts in
            new.pop(key, None)
        if method := new.pop("speculation", None):  # tests/recipe/launch/test_config.py composes each of them
            assert (ROOT / "configs" / "speculation" / f"{method}.yaml").is_file(), method
        for other, known in merged:
            if other == name and all(known.get(key, value) == value for key, value in new.items()):
                known.update(new)
                break
        else:
            merged.append((name, new))
    return [(name, tuple(f"{key}={value}" for key, value in known.items())) for name, known in merged]


@pytest.mark.parametrize(("name", "overrides"), overrides_by_config(), ids=str)
def test_documented_overrides_compose(name, overrides):
    from recipe.launch.config import compose_config

    compose_config(name, list(overrides))


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_anchors_and_images_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors_of(path.read_text()), f"{page}: {target} has no such heading"


FOLDERS = "sam|recipe|configs|scripts|tests|docs|patches|docker|requirements"


def inline_code(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("page", PRESENT)
def test_every_path_named_exists(page):
    for code in inline_code(PRESENT[page]):
        for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./*-]*\w(?:/|\b)", code):
            assert list(ROOT.glob(path.rstrip("/"))), f"{page}: {path}"


@pytest.mark.parametrize("page", PRESENT)
def test_every_module_and_name_exists(page):
    for code in inline_code(PRESENT[page]):
        for dotted in re.findall(r"(?<![\w/.-])((?:sam|recipe)\.[a-z_]\w*(?:\.\w+)*)(?![\w/=])", code):
            parts = dotted.split(".")
            if len(parts) == 2 and parts[1] in ("npz", "safetensors"):
                continue
            files = [ROOT.joinpath(*parts[:end]) for end in range(len(parts), 0, -1)]
            module = next(path for path in files if path.is_dir() or path.with_suffix(".py").is_file())
            rest = parts[len(module.relative_to(ROOT).parts) :]
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            assert not rest or re.search(rf"\b{rest[0]}\b", source.read_text()), f"{page}: {dotted}"


def test_every_knob_named_exists():
    knobs = set(re.findall(r"^(\w+):", (ROOT / "configs" / "speculation" / "knobs.yaml").read_text(), flags=re.M))
    for page, text in PRESENT.items():
        for code in inline_code(text):
            for knob in re.findall(r"(?<![\w/])speculation\.(\w+)", code):
                assert knob in knobs, f"{page}: speculation.{knob}"


def emitted_metrics() -> set[str]:
    """Names under which a training step's rollout is logged: by running what logs them, on small arrays."""
    from recipe.record.rollout_metrics import RolloutRecord, routing_metrics
    from sam.history.client import COUNTERS as HISTORY
    from sam.routing.meter import Meter
    from sam.routing.policy import ContextPolicy, RoutingSettings
    from sam.sharing.client import COUNTERS as SHARING
    from sam.switch.goodput import Goodput
    from sam.switch.policies import Threshold
    from sam.switch.policy import StepState
    from sam.vllm.async_hooks import COUNTERS
    from sam.vllm.paths.rows import COUNTERS as PATHS
    from sam.vllm.trained import COUNTERS as TRAINED
    from tests.recipe.record.test_rollout_metrics import record
    from tests.sam.vllm.model_runner import make_proposer

    names = set(RolloutRecord.merge([record()]).metrics(tail_threshold=2, rounds=1))
    goodput, state = Goodput(3), StepState(8)
    for _ in range(3):  # unlikely drafts: declined, and then not made for a while
        goodput.choose(state, np.full(24, 1e-3, np.float32), np.arange(0, 25, 3))
        goodput.plan(state)
    goodput.plan(StepState(8, steps_since_plan=5000))  # so long without drafts that some are tried
    goodput.choose(state, np.full(24, 0.05, np.float32), np.arange(0, 25, 3))
    threshold = Threshold(3, batch_size_threshold=8)
    threshold.plan(StepState(8, awaited=1))
    counters = {*goodput.counters, *threshold.counters, *COUNTERS}
    counters |= {*make_proposer().counters}
    names |= {f"rollout/drafter/{name}" for name in (*counters, *HISTORY, *SHARING, *TRAINED, *PATHS)}
    source = (ROOT / "recipe" / "trainer" / "dynamic_sampling.py").read_text()  # to import it takes verl
    meter = Meter(ContextPolicy(RoutingSettings()))
    names |= set(routing_metrics(meter.take(0.0)))
    return names | set(re.findall(r'"(rollout/[\w/]+)":', source))


def test_metrics_page_has_the_names_that_the_code_emits():
    table = re.findall(r"^\| `(rollout/[\w/]+)`.*?\|(.+)\|$", TEXTS["docs/metrics.md"], flags=re.M)
    rows = [name for name, _ in table]
    assert len(rows) == len(set(rows))
    assert [name for name, cells in table if not all(map(str.strip, cells.split("|")))] == [], "unit, normal, meaning"

    def numbered(names) -> list[str]:
        return sorted({re.sub(r"\d+", "N", name) for name in names})

    assert numbered(rows) == numbered(emitted_metrics())


@pytest.mark.parametrize(("package", "order"), [("sam", SAM), ("recipe", RECIPE)])
def test_architecture_lists_the_rooms_in_the_order_of_imports(package, order):
    floors = {room.partition(".")[0]: floor for floor, rooms in reversed(list(enumerate(order))) for room in rooms}
    cells = re.findall(rf"^\| (`{package}/.+?) \|", TEXTS["docs/architecture.md"], flags=re.M)
    rooms = [room for cell in cells for room in re.findall(rf"`{package}/(\w+)", cell)]
    left_out = set(floors) - set(rooms)
    assert all(floors[room] == len(order) - 1 for room in left_out), left_out  # but commands that nobody imports
    listed = [floors[room] for room in rooms]
    assert listed == sorted(listed), dict(zip(rooms, listed, strict=True))
