"""A drafter and its history: as good after a restart as before it, whatever fails."""

import logging
import time

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.history import client as client_module
from sam.history import database
from sam.history.client import MAX_TOKENS_A_STEP, HistoryClient
from sam.history.reading import load

WRITTEN_IN = {"tokenizer": "1f", "model": "qwen3"}
K, SAMPLES = 3, 4
PROMPTS = [np.array([90 + n, 91, 92 + n], np.int32) for n in range(6)]


@pytest.fixture
def open_client(tmp_path):
    opened = []

    def make(tokens=1 << 40, epochs=9, written_in=WRITTEN_IN):
        opened.append(HistoryClient(tmp_path / "history", written_in, tokens, epochs))
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


def epochs():
    """Two epochs of responses to PROMPTS: sentences of the prompt's own, in any order, with slips."""
    random = np.random.default_rng(0)
    sentences = [random.integers(0, 80, (8, 9)) for _ in PROMPTS]

    def response(own):
        text = np.concatenate(own[random.integers(0, len(own), 12)]).astype(np.int32)
        slips = random.random(len(text)) < 0.05
        text[slips] = random.integers(0, 80, slips.sum())
        return text

    return [[[response(own) for _ in range(SAMPLES)] for own in sentences] for _ in range(2)]


def accepted(draft, text):
    count = 0
    while count < min(len(draft), len(text) - 1) and draft[count] == text[count]:
        count += 1
    return count


def roll_out(drafter, client, epoch, name):
    """All responses of an epoch, as an engine would write them; the mean acceptance length."""
    steps = tokens = 0
    for group, texts in enumerate(epoch):
        left = {f"{name} {group} {sample}": text for sample, text in enumerate(texts)}
        whole, drafts = dict(left), dict.fromkeys(left, ())
        for request in left:
            if client:
                client.request_started(request, PROMPTS[group], drafter)
            drafter.start(request, PROMPTS[group])
        if client:
            client._asked.join()  # an engine does not wait; here the order of events must not depend on chance
        while left:
            new = [text[: accepted(drafts[request], text) + 1] for request, text in left.items()]
            steps, tokens = steps + len(new), tokens + sum(map(len, new))
            if client:
                client.deliver(drafter)
            offsets = np.cumsum([0, *map(len, new)])
            made = drafter.step(list(left), np.concatenate(new), offsets, np.full(len(new), K))
            for i, request in enumerate(list(left)):
                drafts[request] = made.token_ids[made.offsets[i] : made.offsets[i + 1]]
                left[request] = left[request][len(new[i]) :]
                if not len(left[request]):
                    del left[request]
        for request, text in whole.items():
            drafter.finish(request)
            if client:
                client.request_finished(request, text.tolist())
    return tokens / steps


def test_a_resumed_run_drafts_at_once_as_well_as_before(open_client):
    first, second = epochs()
    client, drafter = open_client(), make_drafter()
    roll_out(drafter, client, first, "first")
    client.stop()
    goes_on = roll_out(drafter, None, second, "second")
    resumed, client = make_drafter(), open_client()
    after = roll_out(resumed, client, second, "second")
    without = roll_out(make_drafter(), None, second, "second")
    assert after == pytest.approx(goes_on, rel=0.02) and after > 1.15 * without, (goes_on, after, without)
    assert client.counters["history_found_prompts"] == len(PROMPTS)
    assert client.counters["history_appended_tokens"] == sum(len(text) for group in first for text in group)
    assert client.counters["history_late_steps"] == len(PROMPTS), "there in the prompt's first step"


def test_responses_of_two_runs_have_rising_versions(open_client, tmp_path):
    for text in ([1, 2, 3], [4, 5, 6]):
        client = open_client(epochs=1)
        client.weights_updated()
        client.request_started("a", PROMPTS[0], make_drafter())
        client.request_finished("a", text)
        client.stop()
    assert load(tmp_path / "history", PROMPTS[:1]).tokens.tolist() == [4, 5, 6], "the second run's is newer"


def write(client, texts, drafter=None, prompt=PROMPTS[0]):
    before, drafter = client.counters["history_written_responses"], drafter or make_drafter()
    for number, text in enumerate(texts):
        client.request_started(f"written {number}", prompt, drafter)
        drafter.start(f"written {number}", prompt)
        drafter.finish(f"written {number}")
        client._asked.join()  # asked before it is written
        client.request_finished(f"written {number}", text)
    until(lambda: client.counters["history_written_responses"] == before + len(texts))


def visit(client, drafter, name):
    """A request that comes and goes; returns the tokens appended for it."""
    before = client.counters["history_appended_tokens"]
    client.request_started(name, PROMPTS[0], drafter)
    drafter.start(name, PROMPTS[0])
    client._asked.join()
    client.deliver(drafter)
    drafter.finish(name)
    client.request_finished(name, [])
    return client.counters["history_appended_tokens"] - before


def test_a_group_in_memory_gets_what_others_wrote_since_and_a_dropped_one_all(open_client):
    here, there, drafter = open_client(), open_client(), make_drafter()
    write(here, [[1, 2, 3]], drafter)
    write(there, [[4, 5]])
    assert visit(here, drafter, "a") == 2
    write(here, [[1, 1, 1, 1]], drafter)
    assert visit(here, drafter, "b") == 0, "its own text is in the group already"
    write(there, [[6, 7]])
    assert visit(here, drafter, "c") == 2 and visit(here, drafter, "d") == 0
    while drafter.groups.evict():
        pass
    assert visit(here, drafter, "e") == 11, "a new group: all there is"


def test_the_prompt_is_asked_for_once_while_its_requests_run(open_client):
    client, drafter = open_client(), make_drafter()
    write(client, [[1, 2, 3]])
    for request in "ab":
        client.request_started(request, PROMPTS[0], drafter)
        drafter.start(request, PROMPTS[0])
    client._asked.join()
    client.deliver(drafter)
    assert client.counters["history_appended_tokens"] == 3
    drafts = drafter.step(["a", "b"], np.array([1, 2]), np.arange(3), np.full(2, K))
    assert drafts.token_ids.tolist() == [2, 3, 3]


def test_a_step_takes_a_bounded_number_of_tokens(open_client):
    client, drafter = open_client(), make_drafter()
    text = np.random.default_rng(0).integers(0, 1000, 2 * MAX_TOKENS_A_STEP + 50).tolist()
    write(client, [text])
    client.request_started("a", PROMPTS[0], drafter)
    drafter.start("a", PROMPTS[0])
    client._asked.join()
    appended = []
    for _ in range(4):
        client.deliver(drafter)
        appended.append(client.counters["history_appended_tokens"])
    assert appended == [MAX_TOKENS_A_STEP, 2 * MAX_TOKENS_A_STEP, len(text), len(text)]
    for place in (0, MAX_TOKENS_A_STEP + 10):
        drafts = drafter.step(["a"], np.array(text[place : place + 4], np.int32), np.array([0, 4]), np.array([K]))
        assert drafts.token_ids.tolist() == text[place + 4 : place + 4 + K]


def test_a_full_disk_warns_once_and_the_run_goes_on(open_client, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.01)
    pages, open_to_write = [40], database.open_to_write

    def open_on_a_small_disk(*arguments):
        connection = open_to_write(*arguments)
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")
        return connection

    monkeypatch.setattr(database, "open_to_write", open_on_a_small_disk)
    client, drafter = open_client(), make_drafter()
    with caplog.at_level(logging.WARNING):
        write(client, [[1, 2, 3]])
        for attempt in range(3):
            client.request_started("large", PROMPTS[1], drafter)
            client.request_finished("large", list(range(attempt, 100_000)))
            until(lambda: client.counters["history_errors"] > attempt)  # noqa: B023 - used before it changes
    (record,) = caplog.records
    assert "disk is full" in record.getMessage() and client.counters["history_lost_responses"] == 3
    assert visit(client, drafter, "a") == 3, "what was written before is still read"
    pages[0] = 1 << 20  # space again
    client.request_started("large", PROMPTS[1], drafter)
    client.request_finished("large", list(range(100_000)))
    until(lambda: client.counters["history_errors"] > 3 or client.counters["history_written_responses"] == 2)
    write(client, [[4, 5, 6]])
    client.stop()
    assert len(load(tmp_path / "history", PROMPTS[:1]).prompts) == 2


def test_history_of_another_tokenizer_costs_nothing_but_drafts(open_client, monkeypatch, caplog):
    write(open_client(), [[1, 2, 3]])
    with caplog.at_level(logging.WARNING):
        client, drafter = open_client(written_in={**WRITTEN_IN, "tokenizer": "2e"}), make_drafter()
        assert visit(client, drafter, "a") == 0
        until(lambda: client.counters["history_errors"] >= 2)  # of the writer and of the reader
    assert len(caplog.records) == 1 and "this run has 2e" in caplog.text


def test_what_waits_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(client_module, "MAX_WAITING", 4)
    client, drafter = HistoryClient(tmp_path, WRITTEN_IN, 1, 1), make_drafter()  # its threads do not run
    for number in range(10):
        client.request_started(f"{number}", PROMPTS[number % 6] + number, drafter)
        client.request_finished(f"{number}", [1, 2])
    assert client.counters["history_lost_responses"] == 6 and client.counters["history_errors"] == 6
    assert not client._keys and not client._running


def test_placeholders_and_single_tokens_are_not_kept(open_client, tmp_path):
    client = open_client()
    for request, text in {"a": [7], "b": [], "c": [5, 6, -1, -1]}.items():
        client.request_started(request, PROMPTS[0], make_drafter())
        client.request_finished(request, text)
    client.stop()
    assert load(tmp_path / "history", PROMPTS[:1]).tokens.tolist() == [5, 6]
