"""`sam`: one table of commands, and what each says of itself and of a mistake."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from sam.command_line import COMMANDS, main

# A mistake in a command's own words, and what the one line about it says.
MISTAKES = {
    "run": (["--config-name", "dapo_tiny_cpu", "speculatoin=off"], "did you mean speculation?"),
    "doctor": (["speculation=off"], "overrides go with --config-name"),
    "bench": (["--model", "/nowhere"], "/nowhere: no config.json there"),
    "replay": (["--traces", "/nowhere.npz"], "/nowhere.npz: no such file"),
    "tune": (["/nowhere"], "no config.yaml there"),
    "report": (["/nowhere", "/nowhere"], "no metrics.jsonl there"),
    "data": (["nothing", "--output", "/nowhere"], "nothing is unknown: expected some of dapo_math_17k"),
}


def test_the_table_and_the_nearest_command(capsys):
    assert main(["--help"]) == 0 and main([]) == 2
    table, again = capsys.readouterr()
    assert table == again and [line.split()[0] for line in table.splitlines()[2:]] == list(COMMANDS)
    assert main(["bnech"]) == 2 and main(["quux"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: sam bnech: no such command; did you mean bench?" and "expected one of run, " in second


def test_the_versions(capsys):
    assert main(["--version"]) == main(["-V"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and f"sam-rollout {version('sam-rollout')}, verl {version('verl')}, " in first


HELP = """
import sys
from sam.command_line import COMMANDS, main
heavy, light = {*"torch vllm verl ray transformers matplotlib".split()}, "run doctor bench report data".split()
for name in (*light, *sorted({*COMMANDS} - {*light, "distil"})):  # distil loads torch
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code
    found = ({*heavy, "numba"} if name in light else heavy) & {*sys.modules}
    assert not found, f"{name} loads {found}"
"""


def test_help_says_the_commands_name_and_loads_nothing_heavy():
    """Nor numba, of half a second, for those that can do without."""
    found = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(f"usage: sam {name} " in found.stdout for name in COMMANDS if name != "distil")


@pytest.mark.parametrize("name", [*MISTAKES])
def test_a_mistake_is_one_line(name, capsys):
    words, message = MISTAKES[name]
    try:
        code = main([name, *words])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1
