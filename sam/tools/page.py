"""One HTML page in one file, page.html: the answer first, then sections of small pictures side by side and tables.

Pictures are SVG inside the page, so that it can be sent; texts are escaped.
"""

import base64
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

TEMPLATES = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent))


class Picture(NamedTuple):
    """A picture; `title` is what a reader gets who cannot see it, `source` its SVG in base64."""

    title: str
    caption: str
    source: str


class Section(NamedTuple):
    """A part of the page; `texts` are of pieces (text, kind), coloured by kind, `table` is a header and rows of texts
    and numbers; on a narrow window a row of more than four is a block of lines."""

    heading: str
    pictures: Sequence[Picture] = ()
    caption: str = ""
    texts: Sequence[Sequence[tuple[str, str]]] = ()
    table: tuple[Sequence, Sequence[Sequence]] | None = None


def breakable(cell: object) -> Markup:
    """A cell's text, escaped, in which a long word may be broken behind a dot, an underscore or a slash.

    Example:
        >>> breakable("a.b_c & d")
        Markup('a.<wbr>b_<wbr>c &amp; d')
    """
    return Markup(re.sub(r"([._/])(?=[A-Za-z])", r"\1<wbr>", str(escape(cell))))


TEMPLATES.filters["breakable"] = breakable


def page(title: str, answer: Iterable[str], sections: Iterable[Section]) -> str:
    """A whole page; `answer` is the lines of the block at the top, of which the first is set large."""
    return TEMPLATES.get_template("page.html").render(title=title, answer=list(answer), sections=list(sections))


def picture(figure, title: str, caption: str) -> Picture:
    """A matplotlib figure as it is, without a date: equal figures are equal files."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return Picture(title, caption, base64.b64encode(content.getvalue()).decode())
