"""Forced text in a real engine: what is emitted is what was given, and drafts are accepted where they equal it."""

import numpy as np
import pytest

from sam.vllm.bench.forced_text import ForcedText, sampling_arguments
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, Engine, save_model

pytestmark = pytest.mark.engine

DRAFTS = 3
FIXED = {"model": f"{__name__}.FixedDrafts", "num_speculative_tokens": DRAFTS}
LENGTHS = [40, 7, 1, 23, 60, 60, 12, 31]  # more requests than run at once, so that some wait


class FixedDrafts:
    """A drafter for vLLM's `custom_class` that drafts the tokens that follow a request's last one by number."""

    def __init__(self, vllm_config): ...

    def load_model(self, *_args, **_kwargs) -> None: ...

    def propose(self, sampled_token_ids, *_args, **_kwargs) -> list[list[int]]:
        return [
            [(tokens[-1] + i) % VOCABULARY for i in range(1, 1 + DRAFTS)] if tokens else []
            for tokens in sampled_token_ids
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def counting(step: int) -> list[list[int]]:
    """Responses in which a token's number is that of the one before plus `step`; FixedDrafts drafts plus one."""
    return [[(7 * row + step * i) % VOCABULARY for i in range(length)] for row, length in enumerate(LENGTHS)]


def ask(engine, responses):
    """Emitted tokens, and steps that verified drafts with tokens that these emitted."""
    prompts = [[1 + row, 2, 3, 4] * 9 for row in range(len(responses))]
    ForcedText.attach(engine.runner).set_responses(responses)
    assert ForcedText.attach(engine.runner) is ForcedText.attach(engine.runner)
    recorder = StepRecorder.attach(engine.runner)
    recorder.take()
    settings = [{"seed": row, **sampling_arguments(row, response)} for row, response in enumerate(responses)]
    result = engine.generate(prompts, settings, logprobs=None)
    assert [list(tokens) for tokens in result.tokens] == responses
    return recorder.take()


def test_drafts_that_are_right_are_all_accepted_and_wrong_ones_give_a_length_of_one(model):
    with Engine(model, FIXED, 5, enable_chunked_prefill=True, max_num_batched_tokens=48) as engine:
        right, wrong = (ask(engine, counting(step)) for step in (1, 2))
    assert right.drafted_at[0] > 50
    # Of a response's last draft, what lies behind its end is compared with tokens of the model's own.
    assert right.drafted.sum() - right.accepted.sum() <= DRAFTS * len(LENGTHS)
    assert len(right) < sum(LENGTHS) / 4
    assert wrong.drafted.sum() > 300 and wrong.accepted.sum() == 0
    assert wrong.turn_emitted.sum() == wrong.turn_steps.sum() > 100  # mean acceptance length 1.0


def test_text_that_repeats_is_drafted_by_the_automaton(model):
    generator = np.random.default_rng(0)
    phrases = generator.integers(0, VOCABULARY, (4, 10)).tolist()
    with Engine(model, SAM, 5) as engine:
        steps = ask(engine, [(phrases[row % 4] * 9)[: LENGTHS[row]] for row in range(len(LENGTHS))])
    assert steps.accepted.sum() > 50
