"""A page that can be sent: nothing in it is fetched from elsewhere."""

import base64
import re

import pytest

from sam.page import Section, page, picture


def fetched(text: str) -> list[str]:
    return re.findall(r"(?:src|href)='(.*?)'", text)


def test_the_answer_comes_first_and_texts_are_escaped():
    text = page("a < b", ["go: 1.4x", ""], [Section("one", table=(("name", "n"), [("<a>", 1), ("b" * 100, 2)]))])
    assert fetched(text) == [] and "<title>a &lt; b</title>" in text and "<p></p>" not in text
    assert text.index("<p>go: 1.4x</p>") < text.index("<h2>one</h2>") < text.index("<td>&lt;a&gt;</td><td>1</td>")
    assert "<td class='long'>bbb" in text
    for tag in ("table", "tr", "td", "div", "body"):
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag


def test_a_picture_is_inside_the_page():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().plot([1, 2])
    text = page("t", [], [Section("", [picture(figure, "it's a line", "what it shows")])])
    (source,) = fetched(text)
    kind, encoded = source.split(",")
    assert kind == "data:image/svg+xml;base64" and b"<svg " in base64.b64decode(encoded)
    assert "what it shows" in text and "it&#39;s a line" in text
