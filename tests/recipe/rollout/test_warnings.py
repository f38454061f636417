"""A process of a run shows this project's warnings, although vLLM's API server is imported there."""

import logging
import sys

import pytest

import recipe.rollout.server  # noqa: F401 - the process
from sam.log import LINE
from tests.sam.test_log import said_by


@pytest.mark.parametrize("package", ["sam", "recipe"])
def test_what_vllms_server_imports_does_not_silence_this_project(package, capsys, monkeypatch):
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.delenv("SAGEMAKER_CONTAINER_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    try:
        sys.modules["model_hosting_container_standards.logging_config"].configure_root_logger()
        assert logging.root.level == logging.ERROR, "it leaves the root logger alone: sam/log.py can go"
        assert said_by("another.package", capsys) == []
        (line,) = said_by(package, capsys)
    finally:
        logging.root.setLevel(level)
    assert LINE.fullmatch(line)[1] == f"{package}.part"
