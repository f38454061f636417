"""Fixtures that several tests of engines share."""

import pytest


@pytest.fixture(scope="module")
def asynchronous():
    """vLLM's CPU backend schedules asynchronously where an engine asks for it."""
    from tests.sam.engine import async_cpu

    with pytest.MonkeyPatch.context() as monkeypatch:
        async_cpu.install(monkeypatch)
        yield


@pytest.fixture(scope="module")
def ranks_environment():
    """Engines with ranks can be started."""
    from tests.sam.engine import matrix

    with pytest.MonkeyPatch.context() as monkeypatch:
        matrix.environment(monkeypatch)
        yield
