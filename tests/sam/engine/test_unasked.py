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


def tokens_of(answers: list) -> list:
    """Without log-probabilities, which of stock vLLM depend on the requests that share a step."""
    return [tokens for tokens, _ in answers]


def test_every_token_and_log_probability_is_that_of_stock_vllm(found):
    stock, installed = found[False]["behaviours"], found[True]["behaviours"]
    assert len(stock) == 10
    for name, answers in stock.items():
        # Requests wait until their grammar is compiled, in a thread: which share a step differs from run to run, and
        # with it the last bits of a log-probability.
        read = tokens_of if name == "structured" else list
        assert read(installed[name]) == read(answers), name
    assert stock["lora"] != stock["before lora"]
    assert all(len(step) >= 3 for _, steps in stock["named log-probabilities"] for step in steps[:1])


def test_only_the_plugin_is_loaded(found):
    assert found[False]["loaded"] == []
    assert set(found[True]["loaded"]) - {"sam.config", "sam.log", "sam.reading", "sam.trained_drafter"} == {
        "sam.vllm", "sam.vllm.patches", "sam.vllm.plugin", "sam.vllm.v2", "sam.vllm.v2.engine"
    }  # fmt: skip
