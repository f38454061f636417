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
PROMPTS = [np.array([90 + n, 91, 92 + n], np.int32) for n in range(6)]


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


def ask(client, drafter, name, prompt=PROMPTS[0]):
    """A request starts. An engine does not wait for the answer; here the order must not depend on chance."""
    if client:
        client.request_started(name, prompt, drafter)
        client._asked.join()
    drafter.start(name, prompt)


def visit(client, drafter, name):
    """A request that comes and goes; returns the tokens appended for it."""
    before = client.counters["history_appended_tokens"]
    ask(client, drafter, name)
    client.deliver(drafter)
    drafter.finish(name)
    client.request_finished(name, [])
    return client.counters["history_appended_tokens"] - before


def write(client, *texts, drafter=None, prompt=PROMPTS[0]):
    before, drafter = client.counters["history_written_responses"], drafter or make_drafter()
    for number, text in enumerate(texts):
        ask(client, drafter, f"written {number}", prompt)
        drafter.finish(f"written {number}")
        client.request_finished(f"written {number}", text)
    until(lambda: client.counters["history_written_responses"] == before + len(texts))


def draft_all(drafter, client, epoch, name):
    """The steps that an engine takes for all responses of an epoch, by prompt, one after the other."""
    steps, texts = 0, [(group, sample, text) for group, its in enumerate(epoch) for sample, text in enumerate(its)]
    for group, sample, text in texts:
        request, done, drafted = f"{name} {group} {sample}", 0, []
        ask(client, drafter, request, PROMPTS[group])
        while done < len(text):
            left = text[done:].tolist()
            new = 1 + next((i for i in range(len(drafted)) if left[i : i + 1] != [drafted[i]]), len(drafted))
            if client:
                client.deliver(drafter)
            drafted = draft(drafter, request, *left[:new])
            done, steps = done + new, steps + 1
        drafter.finish(request)
        if client:
            client.request_finished(request, text.tolist())
    return steps


def test_a_resumed_run_drafts_at_once_as_well_as_before(open_client):
    """Two epochs of responses: sentences of the prompt's own, in any order."""
    random = np.random.default_rng(0)
    sentences = random.integers(0, 80, (len(PROMPTS), 8, 9)).astype(np.int32)
    first, second = ([[own[random.integers(0, 8, 12)].ravel() for _ in range(4)] for own in sentences] for _ in "ab")
    client, drafter = open_client(), make_drafter()
    draft_all(drafter, client, first, "first")
    client.stop()
    resumed = open_client()
    after = draft_all(make_drafter(), resumed, second, "second")
    assert resumed.counters["history_found_prompts"] == len(PROMPTS)
    assert resumed.counters["history_appended_tokens"] == sum(len(text) for group in first for text in group)
    assert after == pytest.approx(draft_all(drafter, None, second, "second"), rel=0.02)
    assert after < 0.9 * draft_all(make_drafter(), None, second, "second")


def test_responses_of_two_runs_have_rising_versions_and_no_placeholders_or_single_tokens(open_client, tmp_path):
    for texts in ([[1, 2, 3]], [[7], [], [5, 6, -1, -1]]):
        client = open_client(epochs=1)
        client.weights_updated()
        for number, text in enumerate(texts):
            client.request_started(f"{number}", PROMPTS[0], make_drafter())
            client.request_finished(f"{number}", text)
        client.stop()
    assert kept(tmp_path / "history", PROMPTS[0]) == [[5, 6]], "the second run's is newer"


def test_a_group_in_memory_gets_what_others_wrote_since_and_a_dropped_one_all(open_client):
    here, there, drafter = open_client(), open_client(), make_drafter()
    write(here, [1, 2, 3], drafter=drafter)
    write(there, [4, 5])
    assert visit(here, drafter, "a") == 2
    write(here, [1, 1, 1, 1], drafter=drafter)
    assert visit(here, drafter, "b") == 0, "its own text is in the group already"
    write(there, [6, 7])
    assert visit(here, drafter, "c") == 2 and visit(here, drafter, "d") == 0
    while drafter.groups.evict():
        pass
    assert visit(here, drafter, "e") == 11, "a new group: all there is"


def test_a_step_takes_a_bounded_number_of_tokens(open_client):
    client, drafter = open_client(), make_drafter()
    text = np.random.default_rng(0).integers(0, 1000, 2 * MAX_TOKENS_A_STEP + 50).tolist()
    write(client, text)
    ask(client, drafter, "a")
    appended = []
    for _ in range(4):
        client.deliver(drafter)
        appended.append(client.counters["history_appended_tokens"])
    assert appended == [MAX_TOKENS_A_STEP, 2 * MAX_TOKENS_A_STEP, len(text), len(text)]
    for place in (0, MAX_TOKENS_A_STEP + 10):
        assert draft(drafter, "a", *text[place : place + 4]) == text[place + 4 : place + 4 + K]


def test_a_full_disk_warns_once_and_the_run_goes_on(open_client, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.01)
    pages, open_file = [40], database.open_file

    def open_on_a_small_disk(*arguments, **named):
        connection = open_file(*arguments, **named)
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")
        return connection

    monkeypatch.setattr(database, "open_file", open_on_a_small_disk)
    client, drafter = open_client(), make_drafter()

    def write_large(first=0):
        client.request_started("large", PROMPTS[1], drafter)
        client.request_finished("large", list(range(first, 100_000)))

    with caplog.at_level(logging.WARNING):
        write(client, [1, 2, 3])
        for attempt in range(3):
            write_large(attempt)
            until(lambda: client.counters["history_errors"] > attempt)  # noqa: B023 - used before it changes
    (record,) = caplog.records
    assert "disk is full" in record.getMessage() and client.counters["history_lost_responses"] == 3
    assert visit(client, drafter, "a") == 3, "what was written before is still read"
    pages[0] = 1 << 20  # space again
    write_large()
    until(lambda: client.counters["history_errors"] > 3 or client.counters["history_written_responses"] == 2)
    write(client, [4, 5, 6])
    client.stop()
    assert len(kept(tmp_path / "history", PROMPTS[0])) == 2
