"""A drafter and its history: as good after a restart as before it, whatever fails."""

import logging
import time

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.history import client as client_module
from sam.history import database
from sam.history.client import MAX_TOKENS_A_STEP, HistoryClient
from tests.sam.history.kept import kept
from tests.sam.stepping import draft

K = 3
PROMPT, OTHER = np.array([90, 91, 92], np.int32), np.array([91, 91, 93], np.int32)


@pytest.fixture
def open_client(tmp_path):
    opened = []

    def make(epochs=9):
        opened.append(HistoryClient(tmp_path / "history", "1f", 1 << 40, epochs))
        opened[-1].start()
        return opened[-1]

    yield make
    for one in opened:
        one.stop()


def make_drafter():
    return Drafter(max_draft_tokens=K, scope="history", history_tokens=1 << 20)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(client, drafter, name):
    """A request starts. An engine does not wait for the answer; here the order must not depend on chance."""
    client.request_started(name, PROMPT, drafter)
    client._asked.join()
    drafter.start(name, PROMPT)


def visit(client, drafter, name):
    """A request that comes and goes; returns the tokens appended for it."""
    before = client.counters["history_appended_tokens"]
    ask(client, drafter, name)
    client.deliver(drafter)
    drafter.finish(name)
    client.request_finished(name, [])
    return client.counters["history_appended_tokens"] - before


def write(client, text, drafter=None):
    before, drafter = client.counters["history_written_responses"], drafter or make_drafter()
    ask(client, drafter, "written")
    drafter.finish("written")
    client.request_finished("written", text)
    until(lambda: client.counters["history_written_responses"] == before + 1)


def test_a_resumed_run_drafts_from_what_was_written_of_which_a_step_takes_a_bounded_part(open_client):
    text = np.random.default_rng(0).integers(0, 1000, 2 * MAX_TOKENS_A_STEP + 50).tolist()
    first = open_client()
    write(first, text)
    first.stop()
    client, drafter, appended = open_client(), make_drafter(), []
    ask(client, drafter, "a")
    for _ in range(4):
        client.deliver(drafter)
        appended.append(client.counters["history_appended_tokens"])
    assert appended == [MAX_TOKENS_A_STEP, 2 * MAX_TOKENS_A_STEP, len(text), len(text)]
    for place in (0, MAX_TOKENS_A_STEP + 10):
        assert draft(drafter, "a", *text[place : place + 4]) == text[place + 4 : place + 4 + K]
    assert client.counters["history_found_prompts"] == 1


def test_responses_of_two_runs_have_rising_versions_and_no_placeholders_or_single_tokens(open_client, tmp_path):
    for texts in ([[1, 2, 3]], [[7], [], [5, 6, -1, -1]]):
        client = open_client(epochs=1)
        client.weights_updated()
        for number, text in enumerate(texts):
            client.request_started(f"{number}", PROMPT, make_drafter())
            client.request_finished(f"{number}", text)
        client.stop()
    assert kept(tmp_path / "history", PROMPT) == [[5, 6]], "the second run's is newer"


def test_a_group_in_memory_gets_what_others_wrote_since_and_a_dropped_one_all(open_client):
    here, there, drafter = open_client(), open_client(), make_drafter()
    write(here, [1, 2, 3], drafter)
    write(there, [4, 5])
    assert visit(here, drafter, "a") == 2
    write(here, [1, 1, 1, 1], drafter)
    assert visit(here, drafter, "b") == 0, "its own text is in the group already"
    write(there, [6, 7])
    assert visit(here, drafter, "c") == 2 and visit(here, drafter, "d") == 0
    while drafter.groups.evict():
        pass
    assert visit(here, drafter, "e") == 11, "a new group: all there is"


def test_a_full_disk_warns_once_and_the_run_goes_on(open_client, monkeypatch, caplog, tmp_path):
    open_file = database.open_file

    def open_on_a_small_disk(*arguments, **named):
        connection = open_file(*arguments, **named)
        connection.execute("PRAGMA max_page_count = 40")
        return connection

    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(database, "open_file", open_on_a_small_disk)
    caplog.set_level(logging.WARNING)
    client, drafter = open_client(), make_drafter()
    write(client, [1, 2, 3])
    for attempt in range(3):
        client.request_started("large", OTHER, drafter)
        client.request_finished("large", list(range(attempt, 100_000)))
        until(lambda: client.counters["history_errors"] > attempt)  # noqa: B023 - used before it changes
    (record,) = caplog.records
    assert "disk is full" in record.getMessage() and client.counters["history_lost_responses"] == 3
    assert visit(client, drafter, "a") == 3, "what was written before is still read"
    write(client, [4, 5, 6])
    assert len(kept(tmp_path / "history", PROMPT)) == 2
