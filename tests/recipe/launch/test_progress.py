"""The line of progress: on a terminal one that moves, elsewhere whole lines."""

import json

from sam_recipe.launch import progress

ROW = {
    "rollout/reward_all/mean": 0.25,
    "response_length/mean": 84.6,
    "rollout/seconds": 6.04,
    "rollout/spec_accept_length": 2.413,
    "rollout/spec_drafted_tokens": 10.0,
}


def write(directory, *steps):
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **ROW}) + "\n" for step in steps))


def enter(directory, phase):
    (directory / "state.json").write_text(json.dumps({"phase": phase}))


def test_without_a_terminal_whole_lines_come_now_and_then(tmp_path, capsys):
    bar = progress.Progress(tmp_path, total_steps=3)
    for phase in ("starting Ray", "starting the workers", "starting the engines", "weight_sync", "first validation"):
        enter(tmp_path, phase)
        bar.update()
    enter(tmp_path, "running")
    bar.update()
    for steps in ((1,), (1, 2), (1, 2, 3)):
        write(tmp_path, *steps)
        bar.update()
    bar.close()
    shown = capsys.readouterr().err
    lines = shown.splitlines()
    assert "\r" not in shown
    phases, lines = lines[:6], lines[6:]
    names = ("starting", "starting Ray", "starting the workers", "starting the engines", "first validation", "training")
    assert tuple(line.partition(":")[0] for line in phases) == names, "each as it begins"
    assert "1/3" in lines[0] and "reward +0.25" in lines[0]
    assert not any("2/3" in line for line in lines), "within half a minute of the first"
    assert "3/3" in lines[-1]
    progress.Progress(tmp_path, total_steps=10, first=4).close()
    assert "4/10" in capsys.readouterr().err, "a resumed run begins at its checkpoint"
