"""Sessions of vLLM's streaming input: requests that stop, often inside accepted drafts, and go on by further input."""

import copy
import itertools
import random
from types import SimpleNamespace

import pytest

from tests.sam.engine.tiny_engine import Engine

pytestmark = pytest.mark.engine

INPUTS = 4
DRAFTS = {"num_speculative_tokens": 5, "policy": "always"}
# Blocks so small that most texts end in the middle of a block that is full otherwise, steps so small that input comes
# in pieces.
SMALL = {"block_size": 16, "max_num_batched_tokens": 64, "batch": 32}
# Three sessions at once do not fit.
TIGHT = {"block_size": 16, "num_gpu_blocks_override": 22}
STOPS = [{"stop_token_ids": list(range(row, 300, 7)), "max_tokens": 30} for row in range(6)]
DRAWN = [{"temperature": 0.5 * (row % 3), "presence_penalty": row % 2, "seed": row} for row in range(6)]


def inputs_of(session: int) -> list[list[int]]:
    """3 to 18 tokens each."""
    generator = random.Random(session)
    words = [1 + session, 7, 30 + 3 * session, 2, 9 + session, 40]
    return [generator.choices(words, k=generator.randint(3, 18)) for _ in range(INPUTS)]


class Sessions:
    """Sessions of an engine in this process, fed as AsyncLLM.generate feeds its engine.

    Args:
        is_early: whether all input is there at the start, rather than each when the one before is answered.
        settings: keywords of SamplingParams, of each session.
    """

    def __init__(self, engine: Engine, settings: list[dict], is_early: bool):
        self.engine, self.vllm, self.is_early = engine, engine.llm.llm_engine, is_early
        self.settings = dict(zip(map(str, range(len(settings))), settings, strict=True))
        self.waiting = {name: list(enumerate(inputs_of(int(name)))) for name in self.settings}
        self.tokens = {name: [] for name in self.settings}
        self.logprobs = {name: [] for name in self.settings}

    def add(self, name: str) -> None:
        """A session's next input, or its end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        is_end = not self.waiting[name]
        number, tokens = (INPUTS, [0]) if is_end else self.waiting[name].pop(0)
        common = {"temperature": 0.0, "max_tokens": 12 + 5 * number, "ignore_eos": True, "logprobs": 2}
        parameters = SamplingParams(
            **common | self.settings[name], detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True
        )
        prompt = {"prompt_token_ids": tokens}
        request = self.vllm.input_processor.process_inputs(
            name, prompt, parameters, supported_tasks=("generate",), resumable=not is_end
        )
        request.external_req_id = name
        own = copy.copy(request)  # both sides append to their prompts
        own.prompt_token_ids = list(request.prompt_token_ids)
        self.vllm.output_processor.add_request(own, None)
        self.vllm.engine_core.add_request(request)

    def run(self) -> SimpleNamespace:
        """All tokens and log-probabilities."""
        self.engine.llm.reset_prefix_cache()
        for name in self.settings:
            for _ in range(INPUTS + 1 if self.is_early else 1):
                self.add(name)
        for _ in range(2000):
            if not self.vllm.has_unfinished_requests():
                break
            for output in self.vllm.step():
                self.take(output.request_id, output.outputs[0])
        counted = self.engine.count()
        return SimpleNamespace(tokens=self.tokens, logprobs=self.logprobs, **counted)

    def take(self, name: str, output) -> None:
        self.tokens[name] += output.token_ids
        self.logprobs[name] += [{token: one.logprob for token, one in step.items()} for step in output.logprobs or []]
        if output.finish_reason and not self.is_early and self.waiting[name] is not None:
            is_end = not self.waiting[name]
            self.add(name)
            self.waiting[name] = None if is_end else self.waiting[name]


def ask(engine: Engine, asked) -> list[SimpleNamespace]:
    return [Sessions(engine, settings, is_early).run() for settings, is_early in asked]


ASKED = list(itertools.product([[{}], [{}] * 6, STOPS, DRAWN], [True, False]))


@pytest.fixture(scope="module")
def expected(model):
    with Engine(model) as engine:
        return ask(engine, ASKED)


def assert_answered(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert one.accepted > 0


@pytest.mark.parametrize("arguments", [{}, SMALL, TIGHT], ids=["usual", "small", "tight"])
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
def test_sessions_say_the_same_with_drafts(model, expected, is_asynchronous, arguments, request):
    if is_asynchronous:
        request.getfixturevalue("asynchronous")
    with Engine(model, "sam", asynchronous=is_asynchronous, speculation=DRAFTS, **arguments) as engine:
        found = ask(engine, ASKED)
        assert engine.counters()["draft_errors"] == 0
    assert_answered(found, expected)
    assert bool(sum(one.preemptions for one in found)) == (arguments is TIGHT)


def test_a_kv_connector_is_told_of_the_text_alone(model, monkeypatch):
    with Engine(model, "sam", speculation=DRAFTS) as engine:
        scheduler, told = engine.llm.llm_engine.engine_core.engine_core.scheduler, []
        finish = scheduler._connector_finished

        def note(request):
            told.append((request.num_computed_tokens, request.num_tokens - 1))
            return finish(request)

        monkeypatch.setattr(scheduler, "_connector_finished", note)
        assert engine.generate().accepted > 0
    assert len(told) == 12 and all(computed == text for computed, text in told)
