"""sam_recipe.patch on the published sources: all or nothing, to the byte, and clear about what it refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sam.verify.originals import ascend_source

pytestmark = pytest.mark.network  # the published sources

REPOSITORY = Path(__file__).parents[2]
VERSION = "0.23.0.post1"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with vllm-ascend's published sources as installed: package and metadata."""
    root = tmp_path_factory.mktemp("published")
    shutil.unpack_archive(ascend_source(REPOSITORY / ".cache" / "peers"), root)
    inner = root / f"vllm_ascend-{VERSION}"
    shutil.move(inner / "vllm_ascend", root / "vllm_ascend")
    information = root / f"vllm_ascend-{VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {VERSION}\n")
    shutil.rmtree(inner)
    return root


@pytest.fixture
def root(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "site-packages"))


def tool(root: Path, command: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "sam_recipe.patch", command, "--root", root]
    finished = subprocess.run(words, capture_output=True, text=True)
    return finished.returncode, finished.stdout + finished.stderr


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


RUNNER = "vllm_ascend/worker/model_runner_v1.py"
SAMPLER = "vllm_ascend/sample/rejection_sampler.py"


def test_apply_break_apply_revert(root, published):
    assert ": published (" in tool(root, "status")[1]
    code, said = tool(root, "apply")
    assert code == 0 and said.endswith(": patched (0001-custom-class-proposers.patch, 0002-rejection-sampler.patch)\n")
    patched = content(root)
    changed = {name for name, text in patched.items() if text != (published / name).read_bytes()}
    assert changed == {RUNNER, SAMPLER, "vllm_ascend/spec_decode/__init__.py"}
    (root / SAMPLER).write_bytes((published / SAMPLER).read_bytes())  # as after an interrupted copy
    assert ": half patched (" in tool(root, "status")[1]
    for _ in range(2):
        assert tool(root, "apply")[0] == 0 and content(root) == patched
    for _ in range(2):
        assert tool(root, "revert")[0] == 0 and content(root) == content(published)


def test_an_edit_another_version_or_none_is_refused_and_left_alone(root, tmp_path):
    (root / RUNNER).write_text((root / RUNNER).read_text().replace("if not self.drafter:", "if self.drafter is None:"))
    before = content(root)
    code, said = tool(root, "apply")
    assert code == 2 and f"{RUNNER} is neither as published nor as patched" in said and content(root) == before
    metadata = root / f"vllm_ascend-{VERSION}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(VERSION, "0.18.0"))
    metadata.parent.rename(root / "vllm_ascend-0.18.0.dist-info")
    for place, found in ((root, "0.18.0"), (tmp_path / "nothing", None)):
        code, said = tool(place, "apply")
        assert code == 2 and f"vllm-ascend==0.23.0.post1 is not installed here, but {found}: " in said
