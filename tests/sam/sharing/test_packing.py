"""Messages and replies as bytes: what comes out is what went in."""

import numpy as np
import pytest

from sam.sharing.messages import Message, Reply
from sam.sharing.packing import pack, unpack
from sam.sharing.view import View
from tests.sam.sharing.channel import RUN, make_groups, tokens

KEYS = [bytes([number]) * 16 for number in range(3)]


def exchanged():
    """A message and its reply, in which nothing is empty."""
    groups, views = make_groups(), [View(RUN, client, 1) for client in (5, 6)]
    for view in views:
        for slot, key in enumerate(KEYS):
            view.start(slot, key, 2, 0)
            view.append(slot, 0, tokens(*range(slot + view.client)))
    messages = [view.message(0) for view in views]
    return messages[1], [groups.exchange(message, 1.0) for message in messages][1]


@pytest.mark.parametrize("index", [0, 1], ids=["message", "reply"])
def test_what_is_unpacked_is_what_was_packed(index):
    before = exchanged()[index]
    after = unpack(type(before), pack(before))
    for name, one, other in zip(before._fields, before, after, strict=True):
        assert type(one) is type(other) and np.array_equal(one, other), name
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape) and one.size, name
            assert other.flags.aligned


def test_what_holds_nothing_and_text_that_is_not_ascii():
    empty = View("Läufe", 1, 1)
    empty.start(0, KEYS[0], 0, 0)
    after = unpack(Message, pack(empty.message(0)))
    assert after.run_id == "Läufe" and len(after.tokens) == 0 and after.offsets.tolist() == [0]


@pytest.mark.parametrize("kind", [Message, Reply])
def test_other_bytes_are_refused(kind):
    packed = pack(exchanged()[kind is Reply])
    for wrong in (packed[:-1], packed + b"x", b"", bytes(200)):
        with pytest.raises(ValueError):
            unpack(kind, wrong)
