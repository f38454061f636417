"""Requests by replica: which slot, what kind, and where they come from."""

from recipe.report.gantt import Span, draw, kinds, lanes, spans_of_log


def test_a_span_takes_the_lowest_free_slot_of_its_replica():
    spans = [Span(0, 0, 0, 0.0, 3.0), Span(1, 0, 0, 0.0, 1.0), Span(2, 0, 1, 0.5, 2.0), Span(3, 0, 0, 1.0, 2.0)]
    assert lanes(spans) == [0, 1, 0, 1]


def test_kinds():
    chunk = [Span(0, 0, "a", 0.0, 1.0), Span(0, 0, "a", 1.0, 2.0), Span(0, 0, "b", 2.0, 3.0)]
    others = [Span(1, 0, "a", 3.0, 4.0), Span(2, 1, "a", 4.0, 9.0)]
    assert kinds([*chunk, *others], has_probes=True) == ["probe", "again", "moved", "first", "last"]
    assert kinds([*chunk, *others], has_probes=False) == ["first", "again", "moved", "first", "last"]


def test_rollouts_of_a_log(tmp_path):
    log = [
        (0.0, "settings", {}),
        (0.0, "add_replica", "a", 64, 2, 16),
        *((10.0, "arrive", name, "g", 8, 64, 0, None, None) for name in ("0", "1")),
        (10.5, "decide", True, [["0", "a", 16], ["1", "a", 16]]),
        (11.0, "proceed", "0", 16),
        (11.0, "decide", True, [["0", "a", 16]]),
        (12.0, "finish", "1", 3),
        (13.0, "finish", "0", 3),
        (50.0, "arrive", "2", "h", 8, 64, 0, None, None),
        (50.0, "decide", True, [["2", "a", 16]]),
        (51.0, "abort", "2"),
    ]
    first, second = spans_of_log(log)
    assert first == [Span("0", "g", "a", 0.5, 1.0), Span("1", "g", "a", 0.5, 2.0), Span("0", "g", "a", 1.0, 3.0)]
    assert second == [Span("2", "h", "a", 0.0, 1.0)]
    draw([("a run", first, True)], tmp_path / "requests.png")
    assert (tmp_path / "requests.png").read_bytes().startswith(b"\x89PNG")
