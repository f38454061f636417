"""Requests that stop inside accepted drafts."""

import pytest
from vllm import SamplingParams

from tests.sam.engine.tiny_engine import Engine

pytestmark = pytest.mark.engine
DRAFTS = {"num_speculative_tokens": 5, "policy": "always"}


def test_a_kv_connector_is_told_of_the_text_alone(model, monkeypatch):
    with Engine(model, "sam", speculation=DRAFTS) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        told = []
        finish = scheduler._connector_finished

        def note(request):
            told.append((request.num_computed_tokens, request.num_tokens - 1))
            return finish(request)

        monkeypatch.setattr(scheduler, "_connector_finished", note)
        assert engine.generate().accepted > 0
    assert len(told) == 12 and all(computed == text for computed, text in told)


@pytest.mark.parametrize("method", ["sam", "off"])
def test_a_session_of_streaming_input_is_refused_with_drafts_in_one_line(method, model):
    settings = {"speculation": DRAFTS} if method == "sam" else {}
    with Engine(model, method, **settings) as engine:
        words = ("session", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2))
        process = engine.llm.llm_engine.input_processor.process_inputs
        assert process(*words, supported_tasks=("generate",)) is not None
        if method == "off":
            assert process(*words, supported_tasks=("generate",), resumable=True).resumable
            return
        with pytest.raises(
            ValueError, match="speculation.method=sam: expected off: set it, or send each turn"
        ) as raised:
            process(*words, supported_tasks=("generate",), resumable=True)
        assert "\n" not in str(raised.value)
