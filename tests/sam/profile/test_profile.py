"""Step costs fitted to steps that were made: of a recorded run, and of vLLM's own log."""

import re

import numpy as np
import pytest

from sam.profile.__main__ import as_text, fit, main, read_log
from sam.switch.step_cost import StepCost, least_squares_without_negative_terms
from tests.sam.simulate.test_recorded import COST, write_run

LINE = (
    "INFO 11-21 10:00:0{i} [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
    "throughput: {throughput:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 1.0%"
)
SPECULATION = (
    "INFO 11-21 10:00:0{i} [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {length:.2f}, Accepted "
    "throughput: 1.00 tokens/s, Drafted throughput: {drafted:.2f} tokens/s, Accepted: 10 tokens, Drafted: 30 tokens"
)


def cost(running, drafted):
    return 5.0 + 0.2 * running + 0.1 * (running + drafted)


def write_log(path, running):
    """Every second line speculates: each request drafts 3 tokens, of which 1.5 are accepted."""
    lines = []
    for i, count in enumerate(running):
        drafted, length = (3 * count, 2.5) if i % 2 else (0, 1.0)
        seconds = cost(count, drafted) / 1e3
        lines.append(LINE.format(i=i, throughput=count * length / seconds, running=count, waiting=0))
        if drafted:
            lines.append(SPECULATION.format(i=i, length=length, drafted=drafted / seconds))
    lines.append(LINE.format(i=9, throughput=5.0, running=3, waiting=7))  # full: not a step of so many requests
    lines.append(LINE.format(i=9, throughput=0.0, running=0, waiting=0))
    path.write_text("\n".join(lines))


def test_a_log_of_vllm_gives_the_cost_of_its_steps(tmp_path, capsys):
    write_log(tmp_path / "vllm.log", [64, 48, 32, 24, 16, 8, 4, 2])
    steps = read_log(tmp_path / "vllm.log")
    assert steps[:, 0].tolist() == [64, 48, 32, 24, 16, 8, 4, 2]
    assert steps[:, 1] == pytest.approx([0, 144, 0, 72, 0, 24, 0, 6], rel=0.01)
    output = tmp_path / "cost.json"
    assert main(["--from-log", str(tmp_path / "vllm.log"), "--output", str(output)]) == 0
    table = StepCost.load(output)
    assert table.step_ms(10, np.array([10, 40]), 1) == pytest.approx([cost(10, 0), cost(10, 30)], rel=0.01)
    assert f"speculation.step_cost={output}" in capsys.readouterr().out


def test_without_drafts_in_the_log_a_draft_token_costs_what_a_request_costs(tmp_path):
    steps = np.array([[n, 0.0, cost(n, 0)] for n in (1, 8, 32)])
    assert fit(steps, 4, {}, "").step_ms(4, 8, 1) == pytest.approx([5.0 + 0.3 * 8])


@pytest.mark.parametrize("content, message", [(None, "no such file"), ("INFO nothing here\n", "0 lines about")])
def test_a_log_that_tells_nothing(tmp_path, capsys, content, message):
    path = tmp_path / "vllm.log"
    if content is not None:
        path.write_text(content)
    assert main(["--from-log", str(path), "--output", str(tmp_path / "cost.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cost.json").exists()


def test_least_squares_leaves_negative_terms_out():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    assert least_squares_without_negative_terms(columns, np.array([4.0, 5.0, 7.0])) == pytest.approx([3.0, 1.0])
    assert least_squares_without_negative_terms(columns, np.array([5.0, 5.0, 2.0])) == pytest.approx([4.0, 0.0])


def test_steps_that_took_no_time_are_refused():
    with pytest.raises(ValueError, match="tell nothing"):
        fit(np.array([[n, n, 0.0] for n in (1, 8, 32)], dtype=float), 4, {}, "here")


def test_the_table_is_printed_for_reading():
    text = as_text(fit(np.array([[n, n, cost(n, n)] for n in (1, 8, 32)]), 3, {}, ""))
    assert "columns: tokens per request" in text and len(text.splitlines()) == 2 + 7


def test_recorded_runs_give_the_cost_of_their_steps(tmp_path, capsys):
    output = tmp_path / "cost.json"
    runs = [write_run(tmp_path / "on"), write_run(tmp_path / "off", method="off")]
    assert main(["--from-run", *map(str, runs), "--output", str(output)]) == 0
    table = StepCost.load(output)
    for requests, rows in ((1, 1), (2, 8), (12, 12)):
        assert table.step_ms(requests, rows, 20) == pytest.approx(COST.step_ms(requests, rows, 20), rel=0.02)
    assert "recorded engine steps" in table.source and "of on, off, " in table.source
    assert table.fingerprint == {} and "no fingerprint" in capsys.readouterr().out


def test_of_one_recorded_run_it_says_what_is_a_guess(tmp_path, capsys):
    output = tmp_path / "cost.json"
    # At most 4 requests always drafted.
    assert main(["--from-run", str(write_run(tmp_path / "on", threshold=4)), "--output", str(output)]) == 0
    table = StepCost.load(output)
    assert table.step_ms(2, 8, 20) == pytest.approx(COST.step_ms(2, 8, 20), rel=0.02)
    guess = re.search(r"without drafts had fewer than (\d+) requests: what one takes there is a guess", table.source)
    assert int(guess[1]) >= 4 and table.source in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_that_is_no_run(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert main(["--from-run", str(tmp_path / name), "--output", str(tmp_path / "cost.json")]) == 2
    shown = capsys.readouterr().err
    assert shown == f"error: {tmp_path / name}: no config.yaml there; expected a run directory of recipe.main_dapo\n"
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize("others", [["--model", "here"], ["--from-log", "vllm.log"]])
def test_there_is_one_source(capsys, others):
    with pytest.raises(SystemExit):
        main(["--from-run", "run", *others])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    "axis, message", [("--requests=0,4", "requests="), ("--drafts=1,3", "expected to begin with 1")]
)
def test_axes_of_no_table_are_refused_before_an_engine_is_made(monkeypatch, tmp_path, capsys, axis, message):
    monkeypatch.setattr("sam.vllm.profiled_engine.ProfiledEngine", lambda *_, **__: pytest.fail("an engine was made"))
    assert main(["--model", "here", "--output", str(tmp_path / "cost.json"), axis]) == 2
    assert message in capsys.readouterr().err
