"""Forced text in a real engine: what is emitted is what was given, and drafts are accepted where they equal it."""

import numpy as np
import pytest

from sam.vllm.bench.engine import FixedDrafts
from sam.vllm.bench.forced_text import ForcedText, sampling_arguments
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, generate, save_model

pytestmark = pytest.mark.engine

DRAFTS = 3
FIXED = {"model": "sam.vllm.bench.engine.FixedDrafts", "num_speculative_tokens": DRAFTS}
LENGTHS = [40, 7, 1, 23, 60, 60, 12, 31]  # more requests than run at once, so that some wait


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def counting(step: int) -> list[list[int]]:
    """Responses in which a token's number is that of the one before plus `step`; FixedDrafts drafts plus one."""
    return [[(7 * row + step * i) % VOCABULARY for i in range(length)] for row, length in enumerate(LENGTHS)]


def run(model, responses, speculative_config, **engine):
    """Emitted tokens, and steps that verified drafts with tokens that these emitted."""
    prompts = [[1 + row, 2, 3, 4] * 9 for row in range(len(responses))]
    recorders = []

    def observe(runner):
        ForcedText.attach(runner).set_responses(responses)
        assert ForcedText.attach(runner) is ForcedText.attach(runner)
        recorders.append(StepRecorder.attach(runner))

    settings = [{"seed": row, **sampling_arguments(row, response)} for row, response in enumerate(responses)]
    result = generate(model, prompts, settings, speculative_config, batch=5, observe=observe, logprobs=None, **engine)
    steps = recorders[0].take()
    assert [list(tokens) for tokens in result.tokens] == responses
    return steps


def test_drafts_that_are_right_are_all_accepted(model, monkeypatch):
    monkeypatch.setattr(FixedDrafts, "length", DRAFTS)
    steps = run(model, counting(1), FIXED)
    assert steps.drafted_at[0] > 50
    # Of a response's last draft, what lies behind its end is compared with tokens of the model's own.
    assert steps.drafted.sum() - steps.accepted.sum() <= DRAFTS * len(LENGTHS)
    assert len(steps) < sum(LENGTHS) / 5


def test_drafts_that_are_wrong_give_a_length_of_one(model, monkeypatch):
    monkeypatch.setattr(FixedDrafts, "length", DRAFTS)
    steps = run(model, counting(2), FIXED, enable_chunked_prefill=True, max_num_batched_tokens=48)
    assert steps.drafted.sum() > 300 and steps.accepted.sum() == 0
    assert steps.position_emitted.sum() == steps.position_steps.sum() > 100  # mean acceptance length 1.0


def test_text_that_repeats_is_drafted_by_the_automaton(model):
    generator = np.random.default_rng(0)
    phrases = generator.integers(0, VOCABULARY, (4, 10)).tolist()
    repeating = [(phrases[row % 4] * 9)[: LENGTHS[row]] for row in range(len(LENGTHS))]
    steps = run(model, repeating, SAM)
    assert steps.accepted.sum() > 50
