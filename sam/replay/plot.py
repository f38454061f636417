"""Acceptance length over response position, one panel for each recording and one line for each drafter."""

from pathlib import Path

from sam.command import new_figure


def plot_by_position(rows: list[dict], path: Path) -> None:
    """Draw the `by_position` of `sam.replay`'s rows.

    Raises:
        ValueError: matplotlib is not installed.
    """
    files = list(dict.fromkeys(row["file"] for row in rows))
    columns = min(2, len(files))
    rows_of_panels = -(-len(files) // columns)
    figure = new_figure(5.5 * columns, 3.4 * rows_of_panels)
    panels = figure.subplots(rows_of_panels, columns, squeeze=False).ravel()
    for axes in panels[len(files) :]:
        axes.set_visible(False)
    for axes, file in zip(panels, files, strict=False):
        for row in rows:
            if row["file"] == file:
                label = f"{row['drafter']}, {row['mean_acceptance_length']:.2f}"
                axes.plot(*zip(*row["by_position"], strict=True), marker=".", label=label)
        axes.set_title(f"{file}, k={rows[0]['k']}, scope {rows[0]['scope']}", fontsize=10)
        axes.set(xlabel="position in the response, tokens", ylabel="mean acceptance length")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
