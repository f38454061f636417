"""Proposers of two replicas that share: a sibling's text is drafted from."""

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
    assert proposer.counters["skipped_steps"] == 45 and proposer.counters["draft_errors"] == 0


def test_a_rank_whose_drafts_vllm_does_not_take_shares_nothing(channel):
    made = make_proposer(sharing="replicas")
    made.is_drafting_rank = False
    made.share("address")
    assert made.drafter.client is None
