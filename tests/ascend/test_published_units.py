"""vllm-ascend's own CPU unit tests pass on the patched tree."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.sam_dapo.patch import Patches
from tests.sam.verify.originals import ascend_source

pytestmark = pytest.mark.network

REPOSITORY = Path(__file__).parents[2]
SUITES = ("sample", "spec_decode", "worker", "patch", "core")
OPTIONS = ("--ignore-glob=*/a2/*", "--ignore-glob=*/a3_2/*", "-p", "no:cacheprovider", "-q", "-rN")


def tree(folder: Path) -> Path:
    """The installed package, patched, beside its tests."""
    site = Path(importlib.util.find_spec("vllm_ascend").origin).parent.parent
    for name in ("vllm_ascend", "vllm_ascend-0.23.0.post1.dist-info"):
        shutil.copytree(site / name, folder / name)
    shutil.unpack_archive(ascend_source(REPOSITORY / ".cache" / "peers"), folder / "source")
    shutil.move(next((folder / "source").iterdir()) / "tests", folder / "tests")
    Patches(folder).change("patched")
    return folder


def test_own_unit_tests_pass(tmp_path):
    folder = tree(tmp_path)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *(f"tests/ut/{suite}" for suite in SUITES)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    last = finished.stdout.strip().splitlines()[-1]
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert int(last.split()[0]) >= 280 and "failed" not in last
