"""A page that can be sent: nothing in it is fetched from elsewhere."""

import base64
import re
from html.parser import HTMLParser

import pytest

from sam.page import chart, page, paragraph, side_by_side, table, verbatim


class Tags(HTMLParser):
    """Open tags, and attributes that would fetch something."""

    def __init__(self):
        super().__init__()
        self.open, self.closed, self.fetched = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_the_answer_comes_first_and_texts_are_escaped():
    text = page("a < b", [("one", paragraph("x & y")), ("", verbatim("<z>"))], ["go: 1.4x", "more"])
    read(text)
    assert text.index("go: 1.4x") < text.index("<h2>one</h2>") < text.index("x &amp; y") < text.index("&lt;z&gt;")
    assert "<title>a &lt; b</title>" in text and "<h1>a &lt; b</h1>" in text


def test_without_an_answer_there_is_no_block():
    assert "<div class='answer'>" not in page("t", [])


def test_a_chart_is_inside_the_page():
    pytest.importorskip("matplotlib")
    from sam.command import new_figure

    def draw(values):
        figure = new_figure(3, 2)
        figure.subplots().plot(values)
        return chart(figure, "it's a line", "what it shows")

    (source,) = read(page("t", [("", side_by_side([draw([1, 2])]))])).fetched
    kind, encoded = source.split(",")
    assert kind == "data:image/svg+xml;base64" and re.search(b"<svg ", base64.b64decode(encoded))
    assert "what it shows" in draw([1, 2]) and "it&#39;s a line" in draw([1, 2])


def test_a_table():
    text = table(("name", "n"), [("<a>", 1), ("b" * 100, 2)])
    read(text)
    assert "<th>name</th>" in text and "<td>&lt;a&gt;</td><td>1</td>" in text and "<td class='long'>bbb" in text
