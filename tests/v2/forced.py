"""`python -m tests.v2.forced RUNNER FILE`: what a model runner accepts of drafts on forced text, as JSON.

Each response repeats itself, with some tokens changed: drafts are accepted in part.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
PROMPTS = 3
SAMPLES = 4
TOKENS = 80
REPEATS = 4  # of a text in a response
CHANGED = 0.15  # of a response's tokens


def texts(vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and a response to each."""
    generator = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(PROMPTS):
        prompt = generator.integers(0, vocabulary, 8)
        text = np.tile(generator.integers(0, vocabulary, TOKENS // REPEATS), REPEATS)
        for _ in range(SAMPLES):
            changes = generator.random(TOKENS) < CHANGED
            response = np.where(changes, generator.integers(0, vocabulary, TOKENS), text)
            prompts.append(prompt.tolist())
            responses.append(response.tolist())
    return prompts, responses


def measured(model, asynchronous: bool) -> dict[str, int]:
    """Draft tokens verified and accepted; steps in which a request verified drafts, and the tokens that these gave."""
    from sam.vllm.bench.forced_text import ForcedText, sampling_arguments
    from sam.vllm.step_recorder import StepRecorder
    from tests.sam.engine.tiny_engine import VOCABULARY, Engine

    prompts, responses = texts(VOCABULARY)
    drafter = {"policy": "always", "num_speculative_tokens": 3}
    with Engine(model, "sam", asynchronous=asynchronous, batch=8, speculation=drafter) as engine:
        ForcedText.attach(engine.runner).set_responses(responses)
        recorder = StepRecorder.attach(engine.runner)
        # Greedy: drawing takes most of the time in Triton's interpreter, and what is drawn is replaced.
        asked = [{"temperature": 0.0, **sampling_arguments(row, one)} for row, one in enumerate(responses)]
        found = engine.generate(prompts, asked, logprobs=None)
        assert [list(one) for one in found.tokens] == responses
        assert found.counters["draft_errors"] == 0
        steps = recorder.take()
    # A request's own steps with drafts.
    columns = {"drafted": steps.drafted, "accepted": steps.accepted}
    columns |= {"verify_steps": steps.turn_steps, "verified_tokens": steps.turn_emitted}
    return {name: int(column.sum()) for name, column in columns.items()}


def main(runner: str, file: str) -> None:
    from tests.versions.check import RUNNERS

    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        RUNNERS[runner].prepare(monkeypatch)
        from tests.sam.engine import matrix

        model = matrix.save(Path(folder))
        ways = {"synchronous": False, "asynchronous": True}
        found = {name: measured(model, asynchronous) for name, asynchronous in ways.items()}
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
