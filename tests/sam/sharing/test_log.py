"""The log: what it forgets, and what it takes. How clients read and write it: test_client.py."""

import tracemalloc
from array import array

from sam.drafting.texts import digest
from sam.sharing.log import IDENTITY, NOTHING_WANTED, Log, most_bytes, pack, read_records, records_of, unpack
from tests.sam.stepping import tokens


def write(log, key, text, position=0, client=1):
    """Tokens of a response, by a client that wants nothing."""
    records = records_of(client, 0, position, array("i", text))
    assert log.exchange(pack([(key, NOTHING_WANTED, records)]))[IDENTITY.size :] == b""


def read(log, key, cursor=0):
    """The tokens of each record behind a cursor, and the cursor after them."""
    ((_, begin, records),) = unpack(log.exchange(pack([(key, cursor, b"")]))[IDENTITY.size :])
    rows = list(read_records(records))
    return [text.tolist() for *_, text, _ in rows], begin + (rows[-1][-1] if rows else 0)


def test_the_groups_touched_longest_ago_leave_and_the_budget_holds_whatever_comes():
    log, keys = Log(100_000), [digest(tokens(i)) for i in range(40)]
    for i, key in enumerate(keys):
        write(log, key, [1] * 3000)
        assert log.nbytes <= log.budget_bytes
        if i > 1:
            assert read(log, keys[0])[0], "reading is touching"
        found, cursor = read(log, key)
        assert sum(map(len, found)) == 3000
    assert read(log, keys[1])[0] == []
    write(log, keys[-1], [1] * 100_000)
    assert log.nbytes <= log.budget_bytes
    write(log, keys[-1], [6])
    assert read(log, keys[-1], cursor)[0] == [[6]], "it has left, and its readers miss nothing of the next one"


def test_counted_bytes_cover_what_is_taken():
    """Many groups of a few short responses, in records of a token: the worst case for Python's own objects."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        log = Log(1 << 30)
        for i in range(1000):
            for client in range(4):
                for position in range(10):
                    write(log, digest(tokens(i)), [7], position, client)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * log.nbytes < taken <= log.nbytes <= most_bytes(1000, 4, 10)
