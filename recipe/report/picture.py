"""A picture of the report, and how to draw one."""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.report.runs import Run
from sam.page import chart

# Parts of the page, in reading order; the pictures of FIRST stand below the answer without a heading.
FIRST, TIME, ACCEPTANCE, TRAINING = "", "Where the time went", "Acceptance", "Training"


@dataclass(frozen=True)
class Picture:
    """A drawn figure and what a reader is told of it."""

    name: str
    part: str
    title: str
    caption: str
    figure: object  # matplotlib's

    def html(self) -> str:
        return chart(self.figure, self.title, self.caption)


@dataclass(frozen=True)
class Plot:
    """How to draw one.

    Attributes:
        draw: called with matplotlib's axes, the runs that have what it needs, and Looks; what it returns is added to
            the caption.
        needs: whether a run has what is drawn.
    """

    part: str
    title: str
    caption: str
    draw: Callable
    needs: Callable[[Run], bool]
