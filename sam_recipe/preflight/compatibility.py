"""What is tested with this recipe, taken with a warning, or refused: by compatibility.txt, one table for every run.

A row has a feature; its key, after the settings that it only counts with; what tests of this repository run with; what
is taken with a warning, * for anything; what to say of the rest, which is refused. A key is of the config, the model's
config.json, or of this machine: a package, a module, a plugin of vLLM's or a variable. actor, model, rollout
and vllm are sections as PLACES has them. `python -m sam_recipe.preflight.compatibility` prints docs/compatibility.md.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from sam.trained_drafter import settings_of
from sam_recipe.arguments import did_you_mean
from sam_recipe.launch import versions

PLACES = {name: f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout")}
PLACES["vllm"] = "actor_rollout_ref.rollout.engine_kwargs.vllm"
OF_MACHINE = ("module", "package", "plugin", "variable")
INSTALLED = "installed"
PAGE = """\
# Compatibility

Every run, `--check` and preflight look these up before anything is started. What is tested, tests of this repository
run with; what is not is taken with a warning, `*` is any other value; what is in neither column is refused in one line.
[What has run where](../README.md#what-has-run-where) goes by device. This page is made from
`sam_recipe/preflight/compatibility.txt`.

SGLang is not served. Its door is `SpeculativeAlgorithm.register` with the entry point `sglang.srt.plugins` (read in
0.5.23). Behind it every request drafts a fixed number of tokens in every step, so that the switch would be lost, and
SGLang's own sampler verifies, so that the same tokens with and without drafts would be.

| feature | key, package, module or variable | tested | accepted, not tested with this recipe | refused: all others |
|---|---|---|---|---|
"""
CONDITION = re.compile(r"(\S+?)(!?)=(.+)")


class Row(NamedTuple):
    """A line of the table."""

    feature: str
    kind: str  # one of OF_MACHINE, config.json, or nothing for a key of the config
    key: str
    when: list[str]  # `key=word word` or `key!=word word`
    tested: list[str]
    untested: list[str]
    remark: str


def _row(line: str) -> Row:
    line = re.sub(r"(?<!\S)(actor|model|rollout|vllm)(?=\.)", lambda found: PLACES[found[0]], line)
    feature, place, tested, untested, remark = (cell.strip() for cell in line.split("|"))
    when, _, place = place.rpartition(": ")
    kind, _, key = place.rpartition(" ")
    return Row(feature, kind, key, when.split(" & ") if when else [], tested.split(), untested.split(), remark)


ROWS = [_row(line) for line in Path(__file__).with_suffix(".txt").read_text().splitlines()]


def values_of(row: Row, config: DictConfig) -> list[str]:
    """The key's value as the table writes it, of a list every one; none where the row does not concern a config."""
    for name, is_other, known in (CONDITION.fullmatch(one).groups() for one in row.when):
        if (words_of(OmegaConf.select(config, name))[0] in known.split()) is bool(is_other):
            return []
    if row.kind in OF_MACHINE:
        return words_of(on_this_machine(row.kind, row.key))
    if row.kind:
        settings = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
        return words_of(None if settings.get(row.key) is None else "there")
    return words_of(OmegaConf.select(config, row.key))


def words_of(value: Any) -> list[str]:
    if isinstance(value, ListConfig | list):
        return [word for one in value for word in words_of(one)]
    return ["null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)]


def on_this_machine(kind: str, name: str) -> str | None:
    """A variable's value, a package's version, or whether a module or plugin of vLLM is installed."""
    if kind == "variable":
        return os.environ.get(name)
    if kind == "module":
        return INSTALLED if is_importable(name) else None
    if kind == "plugin":
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        return INSTALLED if any(one.name == name for one in plugins) else None
    if name == "vllm-build":  # the device that it is built for
        return {True: "cpu", False: "gpu"}.get(versions.engine_of_cpu())
    if name == "Python":
        return platform.python_version()
    return cann_version() if name == "CANN" else versions.installed(name)


def is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not there
        return False


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if version := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return version[1].strip()
    return None


def has(row: Row, value: str, known: list[str]) -> bool:
    """Whether a value is one of those; what is not installed never is."""
    is_missing = value == "null" and row.kind in ("module", "package", "plugin")
    return not is_missing and any(fnmatchcase(value, one) for one in known)


def said(row: Row, value: str) -> str:
    kind = "config.json " * (row.kind == "config.json")
    return f"{kind}{row.key}{' ' if row.kind in ('module', 'package', 'plugin') else '='}{value}"


def of_machine(device: str) -> dict[str, tuple[str, str]]:
    """Feature -> what a machine with this device has of it, and whether that is tested, accepted or refused."""
    config, found = OmegaConf.create({"trainer": {"device": device}}), {}
    for row in (row for row in ROWS if row.kind in OF_MACHINE):
        for value in values_of(row, config):
            taken = "accepted" if has(row, value, row.untested) else "refused"
            found[row.feature] = value, "tested" if has(row, value, row.tested) else taken
    return found


def packages_and_variables(config: DictConfig) -> Iterator[str]:
    """Packages, modules and variables that this machine lacks, or has otherwise than the recipe runs with."""
    for row, value, known in _refused(config, OF_MACHINE):
        if row.kind == "variable":
            yield f"{said(row, value)}: processes of the run would stop at it: {row.remark} [variable.refused]"
            continue
        found = said(row, "is not installed" if value == "null" else value)
        expected = f", expected {' or '.join(known)}" * (known != [INSTALLED])
        yield f"{found}{expected}: {row.remark or 'install the pins of requirements/'} [package.version]"


def compatibility(config: DictConfig) -> Iterator[str]:
    """Values of the config that the recipe does not run with."""
    for row, value, known in _refused(config, ("", "config.json")):
        expected = (did_you_mean(value, known) if len(known) > 1 else None) or f"set it to {' or '.join(known)}"
        yield f"{said(row, value)}: {row.remark or 'this recipe does not run with it'}: {expected} [config.refused]"


def _refused(config: DictConfig, kinds: tuple[str, ...]) -> Iterator[tuple[Row, str, list[str]]]:
    for row in (row for row in ROWS if row.kind in kinds):
        known = row.tested + row.untested
        yield from ((row, value, known) for value in values_of(row, config) if not has(row, value, known))


def warnings(config: DictConfig) -> Iterator[str]:
    """One line of all that is taken although no test runs with it."""
    taken = []
    for row in ROWS:
        remark = f" ({row.remark})" * bool(row.remark and row.kind not in OF_MACHINE)
        for value in values_of(row, config):
            if has(row, value, row.untested) and not has(row, value, row.tested):
                taken.append(said(row, value) + remark)
    if taken:
        yield f"not tested with this recipe: {', '.join(taken)} (docs/compatibility.md)"


def page() -> str:
    """docs/compatibility.md."""
    lines = []
    for row in ROWS:
        key = f"{row.kind} {row.key}" if row.kind not in ("", "package") else row.key
        key += f" ({' & '.join(row.when)})" * bool(row.when)
        cells = [" ".join(f"`{value}`" for value in values) for values in (row.tested, row.untested)]
        lines.append(f"| {row.feature} | {key} | {' | '.join(cells)} | {row.remark} |")
    return PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
