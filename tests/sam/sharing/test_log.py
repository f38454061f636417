"""The log: what it takes, gives, forgets and evicts."""

import tracemalloc
from array import array

from sam.drafting.texts import digest
from sam.sharing import log as module
from sam.sharing.log import IDENTITY, MAX_INTEGERS, NOTHING_WANTED, Log, most_bytes, pack, read_records, unpack
from tests.sam.stepping import tokens

KEY, OTHER = digest(tokens(1, 2)), digest(tokens(3))


def write(log, key, text, position=0, client=1, request=0):
    """Tokens of a response, by a client that wants nothing."""
    records = module.records_of(client, request, position, array("i", text))
    assert log.exchange(pack([(key, NOTHING_WANTED, records)]))[IDENTITY.size :] == b""


def read(log, key, cursor=0):
    """Client, request, position and tokens of each record behind a cursor, and the cursor after them."""
    answer = log.exchange(pack([(key, cursor, b"")]))
    ((found, begin, records),) = unpack(answer[IDENTITY.size :])
    assert found == key
    rows = list(read_records(records))
    return [(*row[:3], row[3].tolist()) for row in rows], begin + (rows[-1][-1] if rows else 0)


def test_a_reader_gets_what_follows_its_cursor_of_the_groups_that_it_names():
    log = Log(1 << 20)
    write(log, KEY, [5, 6])
    write(log, OTHER, [9])
    first, cursor = read(log, KEY)
    assert first == [(1, 0, 0, [5, 6])] and read(log, KEY, cursor) == ([], cursor)
    write(log, KEY, [7], position=2)
    write(log, KEY, [8], client=2, request=3)
    assert read(log, KEY, cursor)[0] == [(1, 0, 2, [7]), (2, 3, 0, [8])]


def test_a_cursor_of_a_log_that_was_forgotten_skips_nothing_of_the_next_one():
    log = Log(2_000)
    write(log, KEY, [5] * 100)
    _, cursor = read(log, KEY)
    write(log, OTHER, [9] * 300)  # KEY's group leaves
    write(log, KEY, [6])
    assert read(log, KEY, cursor)[0] == [(1, 0, 0, [6])]
    assert read(Log(1 << 20), KEY, cursor)[0] == [] and Log(1).identity != log.identity


def test_a_long_log_comes_in_whole_records_of_bounded_answers():
    log, text = Log(1 << 24), list(range(3 * MAX_INTEGERS // 2))
    for position in range(0, len(text), 1000):
        write(log, KEY, text[position : position + 1000], position)
    found, cursor = [], 0
    while (rows := read(log, KEY, cursor))[0]:
        assert sum(len(row[3]) for row in rows[0]) <= MAX_INTEGERS
        found, cursor = found + rows[0], rows[1]
    assert sum((row[3] for row in found), []) == text and max(len(row[3]) for row in found) == module.PIECE_TOKENS


def test_the_groups_touched_longest_ago_leave_and_the_budget_holds_whatever_comes():
    log, keys = Log(100_000), [digest(tokens(i)) for i in range(40)]
    for i, key in enumerate(keys):
        write(log, key, [1] * 3000)
        assert log.nbytes <= log.budget_bytes
        if i > 1:
            assert read(log, keys[0])[0], "reading is touching"
            assert len(read(log, key)[0]) == 3000 // module.PIECE_TOKENS + 1
    assert read(log, keys[1])[0] == []
    write(log, KEY, [1] * 100_000)
    assert log.nbytes <= log.budget_bytes and read(log, KEY)[0] == []


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
