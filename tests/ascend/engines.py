"""Engines of generate.py in processes of their own, two at a time."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GENERATE = Path(__file__).with_name("generate.py")
VOCABULARY = 512


def prompts_and_lengths(workload: str, responses: int) -> list[tuple[list[int], int]]:
    """What is asked: of "mixed" some prompts are longer than a step's tokens, and responses are of all lengths."""
    chance, asked = random.Random(0), []
    for _ in range(responses):
        length, tokens = 8, 150
        if workload == "mixed":
            length, tokens = chance.choice([2, 3, 5, 9, 100]), chance.choice([5, 20, 60, 90])
        asked.append(([chance.randrange(VOCABULARY) for _ in range(length)], tokens))
    return asked


def generate(scenarios: dict[str, dict]) -> dict[str, dict]:
    """Results by name of the scenario: its fields are those of generate.Scenario."""
    finished = subprocess.run(
        [sys.executable, str(GENERATE)],
        input=json.dumps(scenarios),
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(GENERATE.parent), str(GENERATE.parents[2])])},
    )
    lines = [line.removeprefix("RESULT ") for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(scenarios), finished.stderr[-6000:]
    return dict(map(json.loads, lines))


def generate_all(*jobs: dict[str, dict]) -> dict[str, dict]:
    """Each job in a process, their results in one dictionary."""
    with ThreadPoolExecutor(2) as pool:
        return {name: one for part in pool.map(generate, jobs) for name, one in part.items()}


def of_model(model: Path, scenarios: dict[str, dict]) -> dict[str, dict]:
    return {name: {"model": str(model)} | one for name, one in scenarios.items()}


def assert_same(results: dict[str, dict], name: str, reference: str, log_probabilities: float = 0.0) -> None:
    """Of as many responses as there are; fewer are asked for the first prompts."""
    one, other = results[name], results[reference]
    count = len(one["tokens"])
    assert one["tokens"] == other["tokens"][:count]
    assert one["reasons"] == other["reasons"][:count]
    for a, b in zip(one["logprobs"], other["logprobs"][:count], strict=True):
        assert a is b is None or max(abs(x - y) for x, y in zip(a, b, strict=True)) <= log_probabilities
