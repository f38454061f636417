"""A real engine, a log that does not answer for a while, and a sibling that goes on to write elsewhere.

Nothing here asserts how long something takes. Time-outs are shortened, so that each passes.
"""

import functools
import logging
import os
import time

import numpy as np
import pytest

from sam.sharing import client, link
from sam.sharing.drafter import SharingDrafter
from sam.sharing.log import Log
from tests.sam.engine.tiny_engine import SAM, generate, save_model
from tests.sam.sharing.server import Server

pytestmark = pytest.mark.engine
PROMPT = [1, 2, 3, 4]
SETTINGS = {"max_tokens": 200, "logprobs": None}
EARLIER, LATER = {"seed": 7, **SETTINGS}, {"seed": 8, **SETTINGS}  # the later one is written elsewhere first


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
    """Responses until the condition holds, within a minute: all must be the same, and drafted for."""
    for _ in range(600):
        tokens, drafted = reader.respond(settings)
        assert tokens == plain and drafted > 0
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("not within a minute")


def make_writer(address):
    """The replica elsewhere, as a function that writes tokens there."""
    drafter, sharing = SharingDrafter(max_draft_tokens=3), client.Client(link.Link(address).ask)
    drafter.share(sharing)
    sharing.start()
    drafter.start("a", np.array(PROMPT, np.int32))
    return lambda tokens: drafter.append(["a"], np.array(tokens, np.int32), np.array([0, len(tokens)]))


def test_a_frozen_log_changes_no_token_and_is_read_from_when_it_answers_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(link, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.4)
    model, address, log = save_model(tmp_path / "model"), link.address_of(str(os.getpid()), 0), Log(1 << 24)
    plain, later = generate(model, [PROMPT] * 2, [EARLIER, LATER]).tokens
    server, write = Server(address, log.exchange), make_writer(address)

    def freeze(llm):
        reader = Reader(llm)
        counters = reader.counters
        write([5, 6])
        respond_until(reader, EARLIER, plain, lambda: counters["sharing_received_tokens"] >= 2)
        errors, server.answer = counters["sharing_errors"], None
        write(list(later))
        # Long enough for every pause, up to the longest, and for questions that are given up again.
        respond_until(reader, EARLIER, plain, lambda: counters["sharing_errors"] >= errors + 4)
        assert counters["sharing_received_tokens"] == 2
        server.answer = log.exchange
        # What the sibling wrote meanwhile arrives, and is drafted from: it is the later response.
        fetched = 2 + len(later)
        respond_until(reader, EARLIER, plain, lambda: counters["sharing_received_tokens"] >= fetched)
        drafter = reader.runner.drafter.drafter
        drafter.start("of the later one", np.array(PROMPT, np.int32))
        drafter.append(["of the later one"], np.array(later[:8], np.int32), np.array([0, 8]))
        assert drafter.draft(["of the later one"], np.array([3])).token_ids.tolist() == list(later[8:11])
        drafter.finish("of the later one")
        respond_until(reader, LATER, later, lambda: True)
        assert counters["draft_errors"] == 0

    with caplog.at_level(logging.WARNING, logger=client.logger.name):
        share = lambda runner: runner.drafter.share(address)  # noqa: E731
        generate(model, [PROMPT], [EARLIER], SAM, observe=share, then=freeze, speculation={"sharing": "replicas"})
    server.end()
    said = [record.message for record in caplog.records if record.name == client.logger.name]
    assert len(said) == 2 and all("drafting goes on without it" in one for one in said), "one for each replica"
