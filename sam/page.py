"""One HTML page in one file: the answer first, then sections with tables and small charts side by side.

Charts are SVG inside the page, so that it can be sent. Texts are escaped here; what other functions of this module
return is HTML and goes in as it is.
"""

import base64
import io
from collections.abc import Iterable, Sequence

from jinja2 import Environment

LONG_CELL = 60  # characters from which a cell may wrap
TEMPLATES = """
{% macro page(title, sections, answer, style) %}<!doctype html>
<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>
<title>{{ title }}</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem;color:#222}
h1{font-size:1.5rem;margin:0 0 1rem}h2{font-size:1.15rem;margin:2.5rem 0 .8rem}p{max-width:48rem}
.answer{border-left:.3rem solid #009E73;background:#f2f8f6;padding:.8rem 1.1rem;overflow-wrap:anywhere}
.answer p{margin:.15rem 0}.answer p:first-child{font-size:1.35rem;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1.5rem}
figure{margin:0;max-width:34rem}figure img{width:100%;height:auto}figcaption{color:#555;font-size:.875rem}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid #ddd;white-space:nowrap;vertical-align:top}
td.long{white-space:normal;min-width:16rem}
pre{background:#f5f5f5;padding:.7rem 1rem;font-size:.875rem;white-space:pre-wrap;overflow-wrap:anywhere}
{{ style | safe }}</style></head><body><h1>{{ title }}</h1>
{%- if answer %}<div class='answer'>{% for line in answer %}<p>{{ line }}</p>{% endfor %}</div>{% endif %}
{%- for heading, content in sections %}
{% if heading %}<h2>{{ heading }}</h2>{% endif %}{{ content | safe }}
{%- endfor %}</body></html>
{% endmacro %}
{% macro chart(title, source, caption) -%}
<figure><img alt='{{ title }}' src='data:image/svg+xml;base64,{{ source }}'>
{%- if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}</figure>
{%- endmacro %}
{% macro line(cells, tag) -%}
<tr>{% for cell in cells %}
{%- set kind = " class='long'" if cell | string | length >= long else "" -%}
<{{ tag }}{{ kind | safe }}>{{ cell }}</{{ tag }}>
{%- endfor %}</tr>
{%- endmacro %}
{% macro paragraph(text) %}<p>{{ text }}</p>{% endmacro %}
{% macro verbatim(text) %}<pre>{{ text }}</pre>{% endmacro %}
{% macro table(header, rows) -%}
<div class='table'><table>{{ line(header, 'th') }}{% for row in rows %}{{ line(row, 'td') }}{% endfor %}</table></div>
{%- endmacro %}
"""
MACROS = Environment(autoescape=True).from_string(TEMPLATES, {"long": LONG_CELL}).module


def page(title: str, sections: Iterable[tuple[str, str]], answer: Iterable[str] = (), style: str = "") -> str:
    """A whole page.

    Args:
        title: text.
        sections: a heading (text, or "" for none) and what stands under it (HTML), in reading order.
        answer: lines of text of the block at the top; the first one is set large.
        style: further CSS.
    """
    return str(MACROS.page(title, sections, list(answer), style))


def chart(figure, title: str, caption: str = "") -> str:
    """A matplotlib figure; `title` is what a reader gets who cannot see it."""
    content = io.BytesIO()
    # Without a date, equal figures are equal files.
    figure.savefig(content, format="svg", metadata={"Date": None})
    return str(MACROS.chart(title, base64.b64encode(content.getvalue()).decode(), caption))


def side_by_side(charts: Iterable[str]) -> str:
    """Charts in as many columns as fit the reader's window."""
    return f"<div class='grid'>{''.join(charts)}</div>"


def table(header: Sequence, rows: Iterable[Sequence]) -> str:
    """A table of texts and numbers; on a narrow window it scrolls by itself."""
    return str(MACROS.table(header, rows))


def paragraph(text: str) -> str:
    """A text."""
    return str(MACROS.paragraph(text))


def verbatim(text: str) -> str:
    """Lines to copy, or a table of characters."""
    return str(MACROS.verbatim(text))
