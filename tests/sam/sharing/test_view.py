"""Whatever becomes of messages, what a client sees becomes equal to what was written elsewhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam.drafting.token_ids import digest
from sam.sharing.arrivals import split
from sam.sharing.view import View
from tests.sam.sharing.channel import make_groups, tokens

KEYS = [digest(tokens(i)) for i in range(2)]
SHARDS = 1


class Site:
    """A client, the responses that it writes, and what it has received of others."""

    def __init__(self, number):
        self.view = View("run", number, SHARDS)
        self.number, self.written, self.received, self.names = number, {}, {}, {}
        for slot, key in enumerate(KEYS):
            self.view.start(slot, key, 0, prompt_tokens=3)
            self.written[slot] = []

    def write(self, slot, text):
        self.view.append(slot, 3 + len(self.written[slot]), np.array(text, np.int32))
        self.written[slot] += text

    def take(self, message, reply):
        arrivals = self.view.apply(0, message, reply)
        for number, key in arrivals.new:
            self.names[number] = key
            self.received[number] = []
        bounds = arrivals.offsets.tolist()
        assert len(set(arrivals.numbers.tolist())) == len(arrivals.numbers)
        for i, (number, position) in enumerate(zip(arrivals.numbers, arrivals.positions.tolist(), strict=True)):
            assert position == len(self.received[number])  # no gap, nothing twice
            self.received[number] += arrivals.tokens[bounds[i] : bounds[i + 1]].tolist()


def settle(sites, groups):
    for _ in range(4):
        for site in sites:
            message = site.view.message(0)
            site.take(message, groups.exchange(message, 0.0))


def check_all_seen(sites):
    for site in sites:
        for slot, key in enumerate(KEYS):
            seen = sorted(text for number, text in site.received.items() if site.names[number] == key and text)
            assert seen == sorted(s.written[slot] for s in sites if s is not site and s.written[slot])


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["write", "ask", "lose", "late", "double", "restart", "drop"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_lost_doubled_and_late_messages_change_nothing(steps):
    sites, groups, late = [Site(number) for number in range(3)], make_groups(), []
    for who, what, slot, text in steps:
        site = sites[who]
        if what == "write":
            site.write(slot, text)
        elif what == "restart":
            groups = make_groups()  # a shard that was killed
        elif what == "drop":  # as evicted, or when its time is over
            for key in list(groups._groups):
                groups._drop(key)
        else:
            message = site.view.message(0)
            if what == "lose":
                continue
            reply = groups.exchange(message, 0.0)
            if what == "late":
                late.append((site, message, reply))
                continue
            site.take(message, reply)
            if what == "double":
                groups.exchange(message, 0.0)
                site.take(message, reply)
            if late:
                old_site, *old = late.pop(len(late) // 2)
                old_site.take(*old)
    for site, *old in late:
        site.take(*old)
    settle(sites, groups)
    check_all_seen(sites)
    assert groups.nbytes == sum(group.nbytes for group in groups._groups.values())


def test_a_gap_in_the_engines_own_text_ends_its_sharing_and_is_counted():
    site, other, groups = Site(1), Site(2), make_groups()
    site.write(0, [1, 2])
    site.written[0] += [9]  # never handed over
    site.write(0, [3])
    settle([site, other], groups)
    assert list(other.received.values()) == [[1, 2]] and site.view.lost_tokens == 1


def test_a_finished_request_is_sent_to_its_end_and_then_forgotten():
    site, groups = Site(1), make_groups()
    site.write(0, [1, 2])
    for slot in (0, 1):
        site.view.finish(slot)
    message = site.view.message(0)
    assert message.tokens.tolist() == [1, 2] and message.since.tolist() == [-1]
    site.take(message, groups.exchange(message, 0.0))
    assert site.view.groups == [{}] and site.view.message(0) is None


def test_an_outage_does_not_grow_the_client_without_bound(monkeypatch):
    monkeypatch.setattr("sam.sharing.view.MAX_LOCAL_TOKENS", 100)
    view = View("run", 1, SHARDS)
    for slot in range(50):
        view.start(slot, digest(tokens(slot)), 0, 0)
        view.append(slot, 0, np.zeros(10, np.int32))
        view.finish(slot)
        view.drop_unconfirmed(0)
    assert len(view.groups[0]) == 10 and view.lost_tokens == 400


def test_forgotten_groups_give_their_numbers_back():
    site, other, groups = Site(1), Site(2), make_groups()
    for _ in range(5):
        other.write(0, [1])
        settle([site, other], groups)
        site.view.forget(KEYS[0])
        site.received, site.names = {}, {}
    settle([site, other], groups)
    assert site.view._highest == 1 and list(site.received.values()) == [[1] * 5]


@pytest.mark.parametrize("tokens_a_part", [1, 3, 1000])
def test_parts_hold_the_same_text(tokens_a_part):
    site, other, groups = Site(1), Site(2), make_groups()
    other.write(0, [1, 2, 3, 4, 5, 6])
    other.write(1, [7, 8])
    settle([other], groups)
    message = site.view.message(0)
    arrivals = site.view.apply(0, message, groups.exchange(message, 0.0))
    parts = split(arrivals, tokens_a_part)
    assert max(len(part.tokens) for part in parts) <= tokens_a_part and sum(len(part.new) for part in parts) == 2
    texts = {number: [] for number, _ in arrivals.new}
    for part in parts:
        for i, number in enumerate(part.numbers):
            assert part.positions[i] == len(texts[number])
            texts[number] += part.tokens[part.offsets[i] : part.offsets[i + 1]].tolist()
    assert sorted(texts.values()) == [[1, 2, 3, 4, 5, 6], [7, 8]]


def test_a_reply_that_does_not_hold_tokens_is_refused_before_it_changes_anything():
    site, other, groups = Site(1), Site(2), make_groups()
    other.write(0, [1, 2])
    settle([other], groups)
    message = site.view.message(0)
    reply = groups.exchange(message, 0.0)
    with pytest.raises(ValueError, match="token -4 in a reply"):
        site.view.apply(0, message, reply._replace(tokens=tokens(1, -4)))
    with pytest.raises(ValueError, match="2 offsets up to 2 for 1 tokens"):
        site.view.apply(0, message, reply._replace(tokens=tokens(1)))
    settle([site], groups)
    assert list(site.received.values()) == [[1, 2]]
