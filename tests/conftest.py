"""One thread for torch, as runs have it: the tensors here are small, so that threads mostly wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture
def pictures(monkeypatch):
    """The matplotlib figures that a test saves, in order."""
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig

    def save(figure, *arguments, **keywords):
        saved.append(figure)
        savefig(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", save)
    return saved
