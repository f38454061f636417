"""What is installed: `pip install sam_rollout-*.whl`, outside of any checkout."""

import subprocess
import zipfile
from pathlib import Path

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
    assert {
        f"{package}/configs/speculation/{path.name}" for path in choices for package in ("sam", "recipe/sam_dapo")
    } <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sam", "recipe", "sam_rollout"}


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
