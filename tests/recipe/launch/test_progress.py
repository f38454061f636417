"""The line of progress: on a terminal one that moves, elsewhere whole lines."""

import json

from recipe.launch import progress

ROW = {
    "rollout/reward_all/mean": 0.25,
    "response_length/mean": 84.6,
    "rollout/seconds": 6.04,
    "rollout/spec_accept_length": 2.413,
    "rollout/spec_drafted_tokens": 10.0,
}


def write(directory, *steps):
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **ROW}) + "\n" for step in steps))


def test_summary_has_what_the_step_has():
    assert progress.summary(ROW) == "reward +0.25, response 85 tokens, rollout 6.0 s, acceptance length 2.41"
    assert progress.summary({**ROW, "rollout/spec_drafted_tokens": 0.0}).endswith("rollout 6.0 s")
    assert progress.summary({"step": 0}) == ""


def test_without_a_terminal_whole_lines_come_now_and_then(tmp_path, capsys):
    bar = progress.Progress(tmp_path, total_steps=3)
    for steps in ((1,), (1, 2), (1, 2, 3)):
        write(tmp_path, *steps)
        bar.update()
    bar.close()
    shown = capsys.readouterr().err
    lines = shown.splitlines()
    assert "\r" not in shown and lines[0].startswith("starting verl, Ray and vLLM:")
    assert "1/3" in lines[1] and "reward +0.25" in lines[1]
    assert not any("2/3" in line for line in lines), "within half a minute of the first"
    assert "3/3" in lines[-1]


def test_a_resumed_run_begins_at_its_last_step(tmp_path, capsys):
    write(tmp_path, 1, 2)
    bar = progress.Progress(tmp_path, total_steps=3)
    bar.close()
    assert "2/3" in capsys.readouterr().err


def test_warnings_come_on_the_screen_once_each(tmp_path, capsys):
    log, said = (
        tmp_path / "train.log",
        "(Server pid=7) (EngineCore pid=8) WARNING 11-24 12:49:53 [sam.vllm.one] no table: é",
    )
    log.write_text(f"{said} of an earlier run\n")
    bar = progress.Progress(tmp_path, total_steps=3)
    for text in (
        f"WARNING 11-24 12:49:53 [arg_utils.py:7] vLLM's\n{said}\n{said}\nERROR 11-24 12:49",
        ":53 [recipe.two] failed\n",
    ):
        with open(log, "a") as file:
            file.write(text)
        bar.update()
    bar.close()
    shown = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("starting verl")]
    assert shown == ["warning: sam.vllm.one: no table: é", "warning: recipe.two: failed"]


def test_verbose_shows_what_is_appended(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("of an earlier run\n")
    screen = progress.LogOnScreen(log)
    with open(log, "a") as file:
        file.write("of this run\n")
    screen.update()
    screen.close()
    assert capsys.readouterr().out == "of this run\n"
