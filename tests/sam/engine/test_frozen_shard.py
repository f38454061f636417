"""A real engine, a real shard on Ray that does not answer for a while, and a sibling that goes on to write elsewhere.

Nothing here asserts how long something takes. The short one has its time-outs shortened, so that each passes.
"""

import functools
import logging
import os
import signal
import time

import pytest

from sam.drafting import origins
from sam.sharing import client as module
from tests.sam.engine.tiny_engine import SAM, generate, save_model
from tests.sam.sharing.conftest import cluster, shards  # noqa: F401
from tests.sam.sharing.engines import Engine, until

pytestmark = pytest.mark.engine
ray = pytest.importorskip("ray")
PROMPT = [1, 2, 3, 4]
SETTINGS = {"max_tokens": 200, "logprobs": None}
EARLIER, LATER = {"seed": 7, **SETTINGS}, {"seed": 8, **SETTINGS}  # the later one is written elsewhere first


@pytest.fixture
def writer(shards):  # noqa: F811
    """The replica elsewhere."""
    engine = Engine(shards[0])
    engine.ask("start", "a", PROMPT)
    yield engine
    engine.kill()


class Reader:
    """An engine in this process that shares: one response at a time."""

    def __init__(self, llm):
        from vllm import SamplingParams

        self._llm = llm
        self._parameters = functools.partial(SamplingParams, temperature=1.0, ignore_eos=True, detokenize=False)
        self.runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.counters = self.runner.drafter.counters

    def respond(self, settings):
        """The response's tokens, and how many tokens were drafted for it."""
        before = self._drafted()
        parameters = self._parameters(**settings)
        (output,) = self._llm.generate([{"prompt_token_ids": PROMPT}], [parameters], use_tqdm=False)
        return output.outputs[0].token_ids, self._drafted() - before

    def _drafted(self):
        values = {metric.name: getattr(metric, "value", None) for metric in self._llm.get_metrics()}
        return values["vllm:spec_decode_num_draft_tokens"]


def respond_until(reader, settings, plain, condition):
    """Responses until the condition holds: all must be the same, and drafted for."""

    def holds():
        tokens, drafted = reader.respond(settings)
        assert tokens == plain and drafted > 0
        return condition()

    until(holds)


@pytest.mark.parametrize("seconds", [0.0, pytest.param(30.0, marks=pytest.mark.long)], ids=["short", "half_a_minute"])
def test_a_frozen_shard_changes_no_token_and_is_read_from_when_it_answers_again(
    shards,  # noqa: F811
    writer,
    seconds,
    tmp_path,
    monkeypatch,
    caplog,
):
    model = save_model(tmp_path / "model")
    plain, later = generate(model, [PROMPT] * 2, [EARLIER, LATER]).tokens
    pid = ray.get(shards[1].state.remote())["pid"]

    def freeze(llm):
        reader = Reader(llm)
        counters = reader.counters
        writer.ask("step", "a", [5, 6])
        respond_until(reader, EARLIER, plain, lambda: counters["sharing_received_tokens"] >= 2)
        errors = counters["sharing_errors"]
        if not seconds:  # from now on: it takes seconds to join Ray
            monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
            monkeypatch.setattr(module, "LONGEST_PAUSE", 0.4)
        os.kill(pid, signal.SIGSTOP)
        try:
            frozen, began = counters["sharing_received_tokens"], time.monotonic()
            writer.ask("step", "a", list(later))
            # Long enough for every pause, up to the longest, and for questions that are given up again.
            enough = lambda: counters["sharing_errors"] >= errors + 4 and time.monotonic() - began >= seconds  # noqa: E731
            respond_until(reader, EARLIER, plain, enough)
            assert counters["sharing_received_tokens"] <= frozen + 2
        finally:
            os.kill(pid, signal.SIGCONT)
        # What the sibling wrote meanwhile arrives, and is drafted from and accepted: it is the later response.
        fetched = frozen + len(later)
        respond_until(reader, EARLIER, plain, lambda: counters["sharing_received_tokens"] >= fetched)
        reader.runner.drafter.take_sources()
        accepted = lambda: reader.runner.drafter.take_sources()[origins.ELSEWHERE, 1]  # noqa: E731
        respond_until(reader, LATER, later, lambda: accepted() > 0)
        assert counters["sharing_reconnects"] >= 1 and counters["draft_errors"] == 0

    shared = {"sharing": "replicas", "sharing_interval_ms": 20}
    with caplog.at_level(logging.WARNING, logger=module.logger.name):
        generate(
            model,
            [PROMPT],
            [EARLIER],
            SAM,
            observe=lambda runner: runner.drafter.share(shards[0]),
            then=freeze,
            speculation=shared,
        )
    said = [record.message for record in caplog.records if record.name == module.logger.name]
    assert len(said) == 1 and "drafting goes on without it" in said[0]


def test_a_shard_that_answers_again_is_asked_within_ten_seconds():
    """The time-outs of a real run: the longest pause, and a question that is given up before."""
    assert module.LONGEST_PAUSE + module.ANSWER_SECONDS <= 10.0
