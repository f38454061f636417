"""A page that can be sent: what is in it is shown as it stands. tests/recipe/sam_dapo/report has its pictures."""

import re

from sam.tools.page import Section, page


def test_texts_are_escaped():
    section = Section("one", table=(("name", "n"), [("<a>", 1), ("b" * 100, 2)]), texts=[[("</div>", "drafted")]])
    text = page("a < b", ["x > y"], [section])
    assert "<title>a &lt; b</title>" in text and "<p>x &gt; y</p>" in text
    assert "data-of='name'>&lt;a&gt;</td>" in text and "data-of='n'>1</td>" in text
    for tag in ("table", "tr", "td", "div", "body"):
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag
