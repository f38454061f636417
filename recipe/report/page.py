"""The report's page, as HTML in one file and as Markdown: the answer, four pictures, then the details."""

from recipe.report import sources, stock, tables
from recipe.report.answer import answer, remarks, ten_lines
from recipe.report.picture import FIRST, Picture
from recipe.report.runs import Run, config_difference
from sam import page

TITLE = "Does speculation pay?"
# The first picture is as wide as two, where there is room for two.
STYLE = """
.first{margin-top:2rem}
@media(min-width:46rem){.first figure:first-child{grid-column:span 2;max-width:none}}
details{margin-top:2.5rem}summary{cursor:pointer;font-size:1.15rem;font-weight:600}details h2{font-size:1rem}
"""
Tables = dict[str, tuple[tuple, list[tuple]]]
"""Title to header and rows."""


def all_tables(runs: list[Run], summary: dict, against: stock.AgainstStock | None) -> tuple[Tables, Tables]:
    """Tables in reading order, and those for whoever looks something up; only those that have rows."""
    both = runs[:2]
    differences = [(key, *values) for key, values in config_difference(runs[0].config, runs[1].config).items()]
    read = {
        "What to know of these figures": (("note",), [(line,) for line in remarks(runs, summary)]),
        "Engines alone, on the recorded text": (stock.HEADER, against.table() if against else []),
        "Whether the curves agree": (tables.AGREEMENT_HEADER, tables.agreement(*both)),
        "How the engines ran": (tables.ENGINES_HEADER, tables.engines(runs)),
        "The tail": (tables.TAIL_HEADER, tables.tails(runs)),
        "Acceptance over training": (tables.ACCEPTANCE_HEADER, tables.acceptance_over_training(runs)),
        "Where drafts came from": (sources.HEADER, sources.by_source(runs)),
    }
    looked_up = {
        "Seconds of each phase": (tables.PHASE_HEADER, tables.phases(*both)),
        "In the form of the published tables": (tables.PUBLISHED_HEADER, tables.published(*both)),
        "Step by step": (tables.STEP_HEADER, tables.step_by_step(*both)),
        "What differs between the two configs": (("key", "first", "second"), differences),
        "Versions": (("package", "version"), list(summary["versions"].items())),
    }
    return tuple({title: table for title, table in part.items() if table[1]} for part in (read, looked_up))


def as_markdown(summary: dict, pictures: list[Picture], contents: tuple[Tables, Tables]) -> str:
    headline, *lines = answer(summary)
    text = [f"# {headline}", "", *(line for below in lines for line in (below, ""))]
    text += ["```", *ten_lines(summary), "```", ""]
    for picture in pictures:
        text += [f"## {picture.title}", "", f"![{picture.title}]({picture.name}.png)", "", picture.caption, ""]
    for title, (header, rows) in (contents[0] | contents[1]).items():
        text += [f"## {title}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        text += [*(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
    return "\n".join(text)


def as_html(summary: dict, pictures: list[Picture], contents: tuple[Tables, Tables]) -> str:
    sections = []
    for part in dict.fromkeys(picture.part for picture in pictures):
        charts = page.side_by_side(picture.html() for picture in pictures if picture.part == part)
        sections.append((part, f"<div class='first'>{charts}</div>" if part == FIRST else charts))
    read, looked_up = contents
    sections += [(title, page.table(*table)) for title, table in read.items()]
    folded = "".join(f"<h2>{title}</h2>{page.table(*table)}" for title, table in looked_up.items())
    folded = f"<details><summary>Everything else</summary>{folded}{page.verbatim(chr(10).join(ten_lines(summary)))}"
    sections.append(("", f"{folded}</details>"))
    return page.page(TITLE, sections, answer(summary), STYLE)
