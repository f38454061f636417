"""What is installed: `pip install sam_rollout-*.whl`, outside of any checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run(python: Path, folder: Path, *words: str) -> str:
    ended = subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_wheel_has_all_configs_and_patches_and_no_other_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, files in (("configs", "*.yaml"), ("patches", "*.patch")):
        wanted = {
            path.relative_to(REPOSITORY) for path in (REPOSITORY / "recipe/sam_dapo" / folder).glob(f"**/{files}")
        }
        assert wanted and {str(path) for path in wanted} <= names
    choices = (REPOSITORY / "sam" / "configs" / "speculation").glob("*.yaml")
    assert {f"sam/configs/speculation/{path.name}" for path in choices} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sam", "recipe", "sam_rollout"}


def test_the_page_says_its_name_and_size(wheel):
    page = (REPOSITORY / "docs" / "use_with_your_run.md").read_text()
    assert f"`{wheel.name}` ({wheel.stat().st_size / 1e6:.1f} MB)" in page


def test_the_command_has_a_second_name(python_with_vllm, tmp_path):
    said = run(python_with_vllm.with_name("sam-rollout"), tmp_path, "--version")
    assert said.startswith("sam-rollout 0.")


def test_sam_needs_numpy_and_numba_alone(python_with_vllm, tmp_path):
    """The drafter is importable without vLLM, and nothing of a trainer's is."""
    code = (
        "import sys; sys.modules.update(vllm=None, torch=None, ray=None)\nimport sam, sam.drafting.drafter\nprint(sam)"
    )
    assert "site-packages/sam/__init__.py" in run(python_with_vllm, tmp_path, "-c", code)


def test_commands_work_where_there_is_no_checkout(python_with_verl, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [dapo_tiny_cpu, _self_]\nrun_dir: mine\n")
    sam = (str(python_with_verl.with_name("sam")),)
    assert "train with verl" in run(python_with_verl, tmp_path, *sam, "--help")
    run(python_with_verl, tmp_path, *sam, "run", "--config-dir", ".", "--config-name", "mine", "--check")


def test_patches_are_found_where_there_is_no_checkout(python_with_vllm, tmp_path):
    said = run(python_with_vllm, tmp_path, "-m", "recipe.sam_dapo.patch", "status")
    assert "0001-custom-class-proposers.patch, 0002-rejection-sampler.patch" in said


def beside_a_checkout_of_verls_recipes(folder: Path) -> Path:
    """The file of verl's recipe; its folder `recipe` is a namespace, as TransferQueue's in site-packages is."""
    recipe = folder / "recipe" / "dapo" / "main_dapo.py"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("def main(): ...\n")
    return recipe


PARTS = """
from recipe.dapo.main_dapo import main
import recipe.simple_use_case, recipe.sam_dapo.arguments
print(recipe.sam_dapo.arguments.__file__)
"""


@pytest.mark.parametrize("installed_as", ["wheel", "editable"])
def test_the_recipe_shares_its_namespace(installed_as, python_with_verl, tmp_path):
    """With verl's recipes in the folder where a run starts, and TransferQueue's among the packages."""
    python = python_with_verl if installed_as == "wheel" else Path(sys.executable)
    home = python.parents[1] if installed_as == "wheel" else REPOSITORY
    beside_a_checkout_of_verls_recipes(tmp_path)
    assert run(python, tmp_path, "-c", PARTS).startswith(str(home))
    words = ("--config-name", "dapo_tiny_cpu", "--check")
    run(python, tmp_path, str(python.with_name("sam")), "run", *words)
    run(python, tmp_path, "-m", "recipe.sam_dapo.main_dapo", *words)


def test_a_folder_that_hides_the_recipe_is_one_line(python_with_verl, tmp_path):
    (beside_a_checkout_of_verls_recipes(tmp_path).parents[1] / "__init__.py").touch()
    train = ("-m", "verl.trainer.main_ppo", "hydra.searchpath=[pkg://sam.configs]")
    commands = (
        (str(python_with_verl.with_name("sam")), "run", "--config-name", "dapo_tiny_cpu"),
        (*train, "+speculation=sam"),
    )
    for words in commands:
        ended = subprocess.run([python_with_verl, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2
        assert f"{tmp_path}/recipe/__init__.py hides recipe.sam_dapo: remove that file" in line
    said = subprocess.run(
        [python_with_verl, *train, "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert said.returncode == 0, "a run without speculation is not concerned"
