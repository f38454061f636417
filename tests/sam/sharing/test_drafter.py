"""Drafts from siblings elsewhere: the text that counts, no memory left behind, and two threads at one drafter."""

import threading
import time

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.sharing.drafter import SharingDrafter
from tests.sam.brute_force import check_blocks
from tests.sam.sharing.channel import Channel, make_client
from tests.sam.stepping import append, draft, step, tokens

K = 3


def replicas(number, **settings):
    """Drafters that share through one log, and what their threads do between steps."""
    channel, drafters = Channel(), [SharingDrafter(max_draft_tokens=K, **settings) for _ in range(number)]
    for drafter in drafters:
        drafter.share(make_client(channel))

    def exchange():
        for drafter in drafters * 2:
            drafter.client.exchange()

    return drafters, exchange


def test_the_next_turn_of_a_conversation_is_shared_too_and_other_prompts_are_kept_apart():
    (here, there, third), exchange = replicas(3)
    for drafter, prompt in ((here, 1), (there, 1), (third, 3)):
        drafter.start("a", tokens(prompt))
    append(there, {"a": [7, 8]})
    there.finish("a")
    there.start("next", tokens(1), given=tokens(7, 8, 5, 6))
    append(there, {"next": [5, 6, 9]})
    exchange()
    assert draft(here, "a", 8) == [5, 6, 9] and draft(third, "a", 8) == []
    assert there.counters["sharing_lost_tokens"] == 0


@pytest.mark.parametrize("prompt_tokens", [2, 20])
def test_text_from_elsewhere_teaches_what_text_from_here_does(prompt_tokens):
    """Step by step the same drafts as with the sibling here; and the weights, and the memory of other prompts."""
    rng, alone, drafted = np.random.default_rng(0), Drafter(max_draft_tokens=K), 0
    (here, there), exchange = replicas(2)
    phrases = rng.integers(0, 50, (12, 6)).astype(np.int32)
    for number in range(4):
        prompt = np.append(rng.integers(0, 50, prompt_tokens - 1), number).astype(np.int32)
        for drafter, request in (requests := ((here, "a"), (there, "b"), (alone, "a"), (alone, "b"))):
            drafter.start(request, prompt)
        for _ in range(40):
            own, other = (phrases[rng.integers(12)][: rng.integers(1, 7)] for _ in "ab")
            append(there, {"b": other})
            exchange()
            append(alone, {"b": other})
            found, expected = (step(drafter, {"a": own}) for drafter in (here, alone))
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.acceptance.tolist() == expected.acceptance.tolist()
            drafted += len(found.token_ids)
        for drafter, request in requests:
            drafter.finish(request)
    assert drafted > 300
    assert here.learned.mixing.tobytes() == alone.learned.mixing.tobytes()
    assert here.memory.entries.tobytes() == alone.memory.entries.tobytes()


def test_both_threads_at_once_under_memory_pressure():
    """What the client's thread appends beside the steps of the engine's leaves the automata whole."""
    drafters, exchange = replicas(2, memory_budget_bytes=120_000)
    rng, stop, errors, number = np.random.default_rng(0), threading.Event(), [], 0

    def received(drafter):
        return drafter.counters["sharing_received_tokens"]

    def run():
        while not stop.is_set():
            try:
                exchange()
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while number < 60 or (number < 5000 and min(map(received, drafters)) <= 1000):
        number += 1
        for drafter in drafters:
            drafter.start("a", tokens(number % 5, 2))
        for _ in range(30):
            for drafter in drafters:
                assert set(draft(drafter, "a", *rng.integers(6, size=rng.integers(1, 40)))) <= set(range(6))
            time.sleep(1e-4)  # a forward pass: locks are not fair, and a thread that never rests keeps its turn
        for drafter in drafters:
            drafter.finish("a")
    stop.set()
    thread.join()
    assert errors == []
    for drafter in drafters:
        assert drafter.counters["sharing_errors"] == 0 and received(drafter) > 1000
        check_blocks(drafter.store, list(drafter.groups.prompts))
        while drafter.groups.evict():
            pass
        assert drafter.nbytes == 0 and len(drafter._free_slots) == len(drafter.sequences.texts) - 1, "all given back"
