"""Draw the timeline of docs/ascend.md: `python docs/images/draw_ascend_steps.py [--output FOLDER]`.

Order and overlap are those of the code; lengths are not to scale, nothing is measured.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from draw import FRAME, INK, canvas

SCHEDULE, PREPARE, LAUNCH, DRAFT, DEVICE, WAIT = "#eeeeee", "#d5e6f5", "#fbe3c0", "#cfe8dd", "#f5c6bd", "#ffffff"
NEXT = (("schedule", 9, SCHEDULE), ("prepare", 8, PREPARE))
# Title, then for host and device: label, length and fill of what follows one another.
MODES = (
    (
        "without graphs, synchronous: the host launches every operator",
        (*NEXT, ("launch each operator of the model", 33, LAUNCH), ("sample", 7, LAUNCH), ("wait", 6, WAIT),
         ("draft", 6, DRAFT), *NEXT),
        (("", 17, WAIT), *(("op", 3.6, DEVICE), ("", 0.8, WAIT)) * 8, ("sampler", 10, DEVICE)),
    ),
    (
        "PIECEWISE: graphs between the layers' attention, which the host launches",
        (*NEXT, ("replay", 6, LAUNCH), ("attention", 7.5, LAUNCH), ("replay", 6, LAUNCH), ("attention", 7.5, LAUNCH),
         ("sample", 7, LAUNCH), ("wait", 8, WAIT), ("draft", 6, DRAFT), *NEXT),
        (("", 18, WAIT), ("piece", 7, DEVICE), ("", 1, WAIT), ("attention", 7.5, DEVICE), ("piece", 7, DEVICE),
         ("", 1, WAIT), ("attention", 7.5, DEVICE), ("sampler", 9.5, DEVICE)),
    ),
    (
        "FULL, and decoding steps in FULL_DECODE_ONLY and FULL_AND_PIECEWISE: one graph",
        (*NEXT, ("replay", 6, LAUNCH), ("arguments", 9, LAUNCH), ("sample", 7, LAUNCH), ("wait", 13, WAIT),
         ("draft", 6, DRAFT), *NEXT),
        (("", 18, WAIT), ("the whole forward pass", 25, DEVICE), ("sampler", 9, DEVICE)),
    ),
    (
        "the same under asynchronous scheduling, without drafts: the next step is prepared meanwhile",
        (*NEXT, ("replay", 6, LAUNCH), ("arguments", 9, LAUNCH), ("sample", 7, LAUNCH), *NEXT, ("wait", 4, WAIT),
         ("replay", 6, LAUNCH), ("arguments", 9, LAUNCH), ("sample", 7, LAUNCH)),
        (("", 18, WAIT), ("the whole forward pass", 32, DEVICE), ("sampler", 9, DEVICE), ("", 2, WAIT),
         ("the next forward pass", 33, DEVICE)),
    ),
)  # fmt: skip


def lane(axes, y: float, name: str, parts) -> None:
    axes.text(8, y + 1.6, name, size=7.5, ha="right", va="center", color=INK)
    x = 9.0
    for label, length, fill in parts:
        if fill != WAIT or label:
            style = {"ls": ":" if fill == WAIT else "-", "edgecolor": FRAME, "lw": 0.6}
            axes.add_patch(plt.Rectangle((x, y), length, 3.2, facecolor=fill, **style))
        axes.text(x + length / 2, y + 1.5, label, size=6.4, ha="center", va="center", color=INK)
        x += length


def draw_steps():
    """Host and device in one engine step and the beginning of the next, by graph mode."""
    figure, axes = canvas(104, 56)
    for row, (title, host, device) in enumerate(MODES):
        top = 55 - 13.5 * row
        axes.text(1, top, title, weight="bold", size=8, va="top", color=INK)
        lane(axes, top - 6, "host", host)
        lane(axes, top - 10, "device", device)
    axes.text(103, 0.6, "not to scale, not measured", size=6.8, ha="right", style="italic", color="#555555")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for the PNG file")
    figure = draw_steps()
    output = parser.parse_args(arguments).output
    figure.savefig(output / "ascend_steps.png", dpi=110, pil_kwargs={"optimize": True})
    plt.close(figure)


if __name__ == "__main__":
    main()
