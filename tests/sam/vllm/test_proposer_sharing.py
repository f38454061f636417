"""Proposers of two replicas that share: a sibling's text is drafted from, and what fails changes nothing."""

from types import SimpleNamespace

import pytest

from sam.sharing import drafter
from sam.sharing.client import Client
from sam.vllm import proposer as module
from tests.sam.sharing.channel import Channel
from tests.sam.vllm.model_runner import make_proposer

PROMPT, TEXT = [1, 2], [10, 11, 12, 13, 14, 15]


@pytest.fixture
def channel(monkeypatch):
    """A log in this process; clients have no thread, tests call `exchange`."""
    made = Channel()
    monkeypatch.setattr(drafter, "Link", lambda address: made)
    monkeypatch.setattr(Client, "start", lambda self: None)
    return made


def replicas(**settings):
    made = [make_proposer(sharing="replicas", **settings) for _ in range(2)]
    for proposer in made:
        proposer.share("address")
        proposer.runner.add("a", PROMPT)
    return made


def exchange(channel, *proposers):
    for proposer in proposers:
        channel.clock.now += 0.9
        proposer.drafter.client.exchange()


def test_a_sibling_on_the_other_replica_is_drafted_from(channel):
    writer, reader = replicas()
    writer.runner.step(writer, ["a"], {"a": TEXT})
    reader.runner.step(reader, ["a"], {"a": [20]})
    exchange(channel, writer, reader)
    reader.runner.step(reader, ["a"], {"a": [10]})  # takes what has arrived, and drafts from it
    assert reader.runner.step(reader, ["a"], {"a": [11]}) == {"a": [12, 13, 14]}
    assert reader.counters["sharing_received_tokens"] == len(TEXT)
    assert reader.counters["draft_errors"] == 0


def test_text_leaves_in_each_interval_while_nobody_drafts(channel, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    proposer = replicas(policy="threshold", batch_size_threshold=0)[0]
    runner, client, sent, steps = proposer.runner, proposer.drafter.client, [], []
    put = client.put

    def noted(event, *arguments):
        if event == "append":
            steps.append(step)
            sent.extend(arguments[2].tolist())
        put(event, *arguments)

    monkeypatch.setattr(client, "put", noted)
    for step in range(45):
        clock.now = 0.04 * step
        assert runner.step(proposer, ["a"], {"a": [step]}) == {"a": []}
    assert steps == list(range(0, 45, 3)), "every 120 ms"
    assert sent == list(range(steps[-1] + 1))
    del runner.requests["a"]
    runner.add("b", PROMPT)
    for step in range(45, 49):
        clock.now = 0.04 * step
        runner.step(proposer, ["b"], {"b": [99]})
    assert sent[: sent.index(99)] == list(range(45)), "the end of a request leaves as well"
    assert proposer.counters["skipped_steps"] == 49 and proposer.counters["draft_errors"] == 0


def test_without_a_log_or_with_one_that_fails_it_drafts_from_its_own(channel):
    channel.failure = ConnectionError()
    alone, failing = make_proposer(sharing="replicas"), replicas()[0]
    alone.runner.add("a", PROMPT)
    for proposer in (alone, failing):
        drafts = []
        for token in TEXT + TEXT:
            drafts.append(proposer.runner.step(proposer, ["a"], {"a": [token]})["a"])
            if proposer is failing:
                exchange(channel, failing)
        assert drafts[-1][:1] == TEXT[:1] and proposer.counters["draft_errors"] == 0
    assert failing.counters["sharing_errors"] > 0


def test_a_rank_whose_drafts_vllm_does_not_take_shares_nothing(channel):
    made = make_proposer(sharing="replicas")
    made.is_drafting_rank = False
    made.share("address")
    assert made.drafter.client is None


def test_a_run_that_does_not_share_has_no_client(channel):
    made = make_proposer()
    made.share("address")
    assert not hasattr(made.drafter, "client")
