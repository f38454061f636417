"""A page that can be sent: nothing in it is fetched from elsewhere."""

import base64
from html.parser import HTMLParser

import pytest

from sam.page import Section, page, picture


class Tags(HTMLParser):
    """Open tags, and attributes that would fetch something."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

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
    text = page("a < b", ["go: 1.4x", ""], [Section("one", table=(("name", "n"), [("<a>", 1), ("b" * 100, 2)]))])
    assert read(text).fetched == [] and "<title>a &lt; b</title>" in text and "<p></p>" not in text
    assert text.index("<p>go: 1.4x</p>") < text.index("<h2>one</h2>") < text.index("<td>&lt;a&gt;</td><td>1</td>")
    assert "<td class='long'>bbb" in text


def test_a_picture_is_inside_the_page():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().plot([1, 2])
    text = page("t", [], [Section("", [picture(figure, "it's a line", "what it shows")])])
    (source,) = read(text).fetched
    kind, encoded = source.split(",")
    assert kind == "data:image/svg+xml;base64" and b"<svg " in base64.b64decode(encoded)
    assert "what it shows" in text and "it&#39;s a line" in text
