"""The engine's thread and the client's take turns at one drafter: who waits, for how much, and what they leave."""

import threading
import time

import numpy as np
import pytest

from sam.sharing.client import PART_TOKENS
from sam.sharing.drafter import Turn
from tests.sam.brute_force import check_blocks
from tests.sam.sharing.channel import tokens
from tests.sam.sharing.replicas import K, Replicas, step


@pytest.mark.parametrize("message_tokens", [700, 20 * PART_TOKENS])
def test_a_step_appends_nothing_from_elsewhere_and_waits_for_one_part_at_most(monkeypatch, message_tokens):
    replicas = Replicas()
    here, there = replicas.drafters
    here.start("a", tokens(1))
    there.start("b", tokens(1))
    counts, appends = [], here.append_siblings

    def counted(*arguments):
        assert here._turn._lock.locked()
        counts.append(appends(*arguments))
        return counts[-1]

    monkeypatch.setattr(here, "append_siblings", counted)
    text = np.random.default_rng(0).integers(100, size=20 * PART_TOKENS).tolist()
    for begin in range(0, len(text), message_tokens):
        step(there, "b", *text[begin : begin + message_tokens])
        replicas.exchange()
        questions, appended = (replicas.channel.asked, replicas.channel.waits), len(counts)
        step(here, "a", 5)
        assert (replicas.channel.asked, replicas.channel.waits) == questions and len(counts) == appended
    assert sum(counts) == len(text) and max(counts) <= PART_TOKENS
    step(here, "a", *text[: 2 * K])
    assert step(here, "a", *text[2 * K : 3 * K]) == text[3 * K : 4 * K], "nothing was lost where parts were cut"


def test_a_wait_for_the_clients_thread_is_counted():
    here, _ = Replicas().drafters
    here.start("a", tokens(1))
    before = here.counters["sharing_engine_ms"]
    here._turn._lock.acquire()
    threading.Timer(0.05, here._turn._lock.release).start()
    step(here, "a", 5)
    assert here.counters["sharing_engine_ms"] - before > 40


def test_a_step_that_waits_goes_before_the_next_part():
    turn, order = Turn({"sharing_engine_ms": 0.0}), []

    def engine():
        with turn:
            order.append("step")

    waiting = threading.Thread(target=engine)
    for part in range(3):
        with turn.of_client():
            order.append(part)
            if part == 1:
                waiting.start()
                while not turn._is_awaited:
                    time.sleep(1e-4)
    waiting.join()
    assert order == [0, 1, "step", 2]


def received(drafter):
    return drafter.counters["sharing_received_tokens"]


def test_both_threads_at_once_under_memory_pressure():
    """What the client's thread appends beside the steps of the engine's leaves the automata whole."""
    replicas = Replicas(memory_budget_bytes=120_000)
    here, there = replicas.drafters
    rng, stop, errors = np.random.default_rng(0), threading.Event(), []

    def exchange():
        while not stop.is_set():
            try:
                replicas.exchange(1)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    number = 0
    while number < 60 or (number < 5000 and min(received(drafter) for drafter in replicas.drafters) <= 1000):
        prompt = tokens(number % 5, 2)
        number += 1
        for drafter in (here, there):
            drafter.start("a", prompt)
        for _ in range(30):
            for drafter in (here, there):
                drafts = step(drafter, "a", *rng.integers(6, size=int(rng.integers(1, 40))).tolist())
                assert set(drafts) <= set(range(6))
            time.sleep(1e-4)  # a forward pass: locks are not fair, and a thread that never rests keeps its turn
        for drafter in (here, there):
            drafter.finish("a")
    stop.set()
    thread.join()
    assert errors == []
    for drafter in (here, there):
        assert drafter.counters["sharing_errors"] == 0 and received(drafter) > 1000
        check_blocks(drafter.store, list(drafter.groups._hash))
        while drafter.groups.evict():
            pass
        assert drafter.nbytes == 0 and not drafter._sibling_slots
