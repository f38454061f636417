"""What several files share: a model, what it answers without speculation, and engines that CPUs do not have."""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from tests.sam.engine import matrix

    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def off(model):
    """What an engine without speculation answers to the requests that most files ask. Two engines never run at once:
    one that a fixture keeps is to be started after this."""
    from tests.sam.engine.tiny_engine import Engine

    with Engine(model) as engine:
        return engine.generate()


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
