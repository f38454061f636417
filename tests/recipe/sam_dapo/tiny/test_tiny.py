"""The tiny world: built once, trained the same way every time; solutions are right but for their slips."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from recipe.sam_dapo.tiny import ship, shipped
from recipe.sam_dapo.tiny.assets import AssetSettings, draw_splits, prepare_assets
from recipe.sam_dapo.tiny.model import ModelSettings, build_model
from recipe.sam_dapo.tiny.task import Problem, TaskSettings, score_solution
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer, encode_prompt, encode_response
from recipe.sam_dapo.tiny.warm_start import IGNORED, WarmStartSettings, draw_batches, warm_start

SMALL = AssetSettings(
    train_rows=20,
    val_rows=4,
    model=ModelSettings(32, 32, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1),
    warm_start=WarmStartSettings(steps=3, warmup_steps=1, tokens_per_step=1024),
)


def test_validation_is_kept_out_of_the_warm_start(tmp_path, monkeypatch):
    """tests/recipe/sam_dapo/test_record.py has when a folder is built anew."""
    splits = draw_splits(SMALL)
    assert not set(splits[0]) & set(splits[1]) and draw_splits(SMALL) == splits != draw_splits(replace(SMALL, seed=1))
    trained = []
    monkeypatch.setattr("recipe.sam_dapo.tiny.assets.warm_start", lambda *arguments: trained.append(arguments[4]))
    assert prepare_assets(tmp_path / "assets", SMALL) and not prepare_assets(tmp_path / "assets", SMALL)
    assert trained == [splits[1]]


def test_training_repeats_exactly_and_learns():
    tokenizer, runs = build_tokenizer(), []
    for _ in range(2):
        model = build_model(SMALL.model, tokenizer, seed=0)
        settings = replace(SMALL.warm_start, steps=12, learning_rate=1e-2)
        losses = warm_start(model, tokenizer, TaskSettings(), settings, excluded=[], seed=0)
        runs.append((losses, model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(weights, runs[1][1][name]) for name, weights in runs[0][1].items())
    assert runs[0][0][-1] < runs[0][0][0] - 1


def test_the_shipped_warm_start_is_that_of_todays_task_and_another_task_trains(tmp_path, monkeypatch):
    """Where this fails, what the model learns from has changed: python -m recipe.sam_dapo.tiny.ship"""
    monkeypatch.setattr("recipe.sam_dapo.tiny.assets.warm_start", lambda *arguments: pytest.fail("trains"))
    prepare_assets(tmp_path / "assets", AssetSettings())
    made = load_file(tmp_path / "assets" / "model" / "model.safetensors")
    there = load_file(shipped.FILE)
    assert made.keys() == there.keys()
    assert all(torch.equal(made[name], weights) for name, weights in there.items())
    for other in (AssetSettings(seed=1), AssetSettings(val_rows=65), AssetSettings(task=TaskSettings(max_lines=23))):
        with pytest.raises(pytest.fail.Exception, match="trains"):
            prepare_assets(tmp_path / "another", other)


@pytest.mark.long
def test_the_shipped_warm_start_can_be_made_again(tmp_path, monkeypatch):
    if "avx512f" in Path("/proc/cpuinfo").read_text() or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("made on AVX2 without AVX-512, where sums are added in another order")
    before = load_file(shipped.FILE)
    monkeypatch.setattr(shipped, "FILE", tmp_path / "again.safetensors")
    ship.main()
    again = load_file(shipped.FILE)
    assert all(torch.equal(again[name], weights) for name, weights in before.items())


def test_batches_predict_responses_only_and_skip_validation():
    tokenizer, task, allowed = build_tokenizer(), TaskSettings(max_lines=2), Problem(3, 2, 4, 7)
    every = {Problem(start, 2, first, second) for start in range(25) for first in range(10) for second in range(10)}
    prompt = encode_prompt(tokenizer, allowed.question)
    for row, wanted in zip(*next(draw_batches(tokenizer, task, every - {allowed}, seed=0, tokens=128)), strict=True):
        assert row[: len(prompt)].tolist() == prompt and set(wanted[: len(prompt) - 1].tolist()) == {IGNORED}
        response = wanted[len(prompt) - 1 :]
        response = response[response != IGNORED].tolist()
        assert response == row[len(prompt) :][: len(response)].tolist() and response[-1] == tokenizer.eos_token_id


lines = st.integers(2, 24)
digits = st.integers(0, 9)
problems = lines.flatmap(lambda count: st.builds(Problem, st.integers(0, 26 - count), st.just(count), digits, digits))
HARMLESS = 14  # lines after a slip at which its effect, the Fibonacci number 610, is a multiple of ten


@given(problems, st.data())
def test_a_slip_makes_the_answer_wrong_unless_a_check_repairs_it(problem, data):
    for check in (False, True):
        assert score_solution(problem.solution(check=check), problem.answer) == (True, problem.answer)
    slip = data.draw(st.integers(0, problem.lines - 1))
    right = problem.lines - 1 - slip == HARMLESS
    for solution in (problem.solution(slip), problem.solution(slip, check=True), problem.solution(slip, repair=True)):
        assert score_solution(solution, problem.answer)[0] == right
    assert score_solution(problem.solution(slip, check=True, repair=True), problem.answer)[0]


def test_a_problem_and_its_solution_read_as_documented_and_the_longest_fits():
    problem, chain = Problem(5, 4, 7, 3), ["f 7+3 is 0", "g 3+0 is 3", "h 0+3 is 3", "i 3+3 is 6"]
    assert problem.solution(check=True).splitlines() == [*chain, "check", *chain, "answer: 6"]
    tokenizer = build_tokenizer()
    prompt = tokenizer.decode(encode_prompt(tokenizer, problem.question))
    assert prompt == "<|im_start|>user\nfrom f to i begin 7 3<|im_end|>\n<|im_start|>assistant\n", "Qwen's template"
    longest = Problem(2, 24, 9, 9)
    response = encode_response(tokenizer, solution := longest.solution(check=True))
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(response, skip_special_tokens=True) == solution
    assert len(encode_prompt(tokenizer, longest.question)) <= 128 and len(response) <= 640
