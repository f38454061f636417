"""Pictures of docs/ are drawn by their scripts, shown somewhere, and say what the code does."""

import runpy

import numpy as np

from tests.test_docs import ROOT, TEXTS


def test_no_picture_lies_unused():
    shown = "\n".join(TEXTS.values())
    assert [path.name for path in (ROOT / "docs" / "images").glob("*.png") if f"images/{path.name}" not in shown] == []


def test_pictures_are_drawn_by_the_script(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))["main"](["--output", str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"processes.png", "engine_step.png", "store.png", "goodput.png"}
    assert all((ROOT / "docs" / "images" / name).is_file() for name in drawn)


def test_the_timeline_is_drawn_by_its_script(tmp_path, monkeypatch):
    folder = ROOT / "docs" / "images"
    monkeypatch.syspath_prepend(str(folder))
    runpy.run_path(str(folder / "draw_ascend_steps.py"))["main"](["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["ascend_steps.png"]


def test_the_store_in_the_picture_is_what_the_code_makes():
    from sam.automaton import store, suffix_automaton

    drawn = runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))
    made = store.make_store(1)
    last = store.add_group(made, 0)
    store.reserve(made, 0, 6)
    for token in "abcabd":
        last = suffix_automaton.extend(made, 0, last, ord(token))
    nodes = made.nodes[: len(drawn["NODES"])]
    extra = nodes["first_extra_edge"] == store.IN_TABLE
    state = np.cumsum(~extra) - 1  # number of each state, by its node
    source = np.where(extra, state[np.where(extra, nodes["source"], 0)], state)
    edges = {
        (int(source[i]), int(state[node["target"]]), f"{chr(node['token'])} {node['count']}")
        for i, node in enumerate(nodes)
        if node["count"]
    }
    links = {(int(state[i]), int(state[nodes["link"][i]])) for i in np.flatnonzero(~extra)[1:]}
    names = [f"{source[i]} {chr(nodes['token'][i])}" if extra[i] else str(state[i]) for i in range(len(nodes))]
    assert edges == {*drawn["EDGES"], *drawn["EXTRA"]} and links == {*drawn["LINKS"]}
    assert names == list(drawn["NODES"])
