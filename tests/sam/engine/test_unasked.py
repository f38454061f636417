"""The installed package changes nothing of an engine for which no speculation is configured."""

import json
import os
import subprocess
import sys

import pytest

from tests.sam.engine import stock_behaviours

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By whether vLLM may load the plugin: what a process answered that was given the same work."""
    folder = tmp_path_factory.mktemp("models")
    stock_behaviours.save_models(folder)
    answers = {}
    for loads_plugin in (False, True):
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
        environment |= {} if loads_plugin else {"VLLM_PLUGINS": ""}
        command = [sys.executable, "-m", "tests.sam.engine.stock_behaviours", str(folder)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        lines = [line.removeprefix("FOUND ") for line in run.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, run.stderr[-4000:]
        answers[loads_plugin] = json.loads(lines[0])
    return answers


def alike(one, other) -> bool:
    """Tokens are equal; log-probabilities nearly: of stock vLLM they depend on which requests share a step."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return one is other or one == other or (isinstance(one, float) and abs(one - other) < 1e-4)


def test_every_token_and_log_probability_is_that_of_stock_vllm(found):
    stock, installed = found[False]["behaviours"], found[True]["behaviours"]
    assert len(stock) == 11
    for name, answers in stock.items():
        assert alike(installed[name], answers), (name, installed[name], answers)
    assert stock["lora"] != stock["before lora"]
    assert all(len(step) >= 3 for _, steps in stock["named log-probabilities"] for step in steps[:1])


def test_only_the_plugin_is_loaded(found):
    assert found[False]["loaded"] == []
    assert set(found[True]["loaded"]) - {"sam.config", "sam.log", "sam.reading", "sam.trained_drafter"} == {
        "sam.vllm", "sam.vllm.plugin"
    }  # fmt: skip
