"""The tiny world: built once, trained the same way every time; solutions are right but for their slips."""

from dataclasses import replace

import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sam_recipe.tiny.assets import AssetSettings, draw_splits, prepare_assets
from sam_recipe.tiny.model import ModelSettings, build_model
from sam_recipe.tiny.task import Problem, TaskSettings, as_row, score_solution
from sam_recipe.tiny.tokenizer import build_tokenizer, encode_prompt, encode_response
from sam_recipe.tiny.warm_start import IGNORED, WarmStartSettings, draw_batches, warm_start

SMALL = AssetSettings(
    train_rows=20,
    val_rows=4,
    model=ModelSettings(32, 32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1),
    warm_start=WarmStartSettings(steps=3, warmup_steps=1, tokens_per_step=1024),
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny") / "assets"
    assert prepare_assets(output, SMALL)
    return output


def test_rows_are_the_problems_drawn(assets):
    for split, problems in zip(("train", "val"), draw_splits(SMALL), strict=True):
        rows = pandas.read_parquet(assets / f"{split}.parquet").to_dict("records")
        wanted = [as_row(problem, split, index) for index, problem in enumerate(problems)]
        assert [row | {"prompt": list(row["prompt"])} for row in rows] == wanted


def test_it_is_built_once_and_validation_is_kept_out_of_the_warm_start(assets, tmp_path, monkeypatch):
    """tests/recipe/test_record.py has when a folder is built anew."""
    assert not prepare_assets(assets, SMALL)

    def stop(*arguments):
        assert arguments[4] == draw_splits(SMALL)[1]
        raise KeyboardInterrupt

    monkeypatch.setattr("sam_recipe.tiny.assets.warm_start", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_assets(tmp_path / "assets", SMALL)


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


def test_batches_predict_responses_only_and_skip_validation():
    tokenizer = build_tokenizer()
    task = TaskSettings(max_lines=2)
    every = {Problem(start, 2, first, second) for start in range(25) for first in range(10) for second in range(10)}
    allowed = Problem(3, 2, 4, 7)
    inputs, targets = next(draw_batches(tokenizer, task, every - {allowed}, seed=0, tokens=128))
    prompt = encode_prompt(tokenizer, allowed.question)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert row[: len(prompt)] == prompt
        assert wanted[: len(prompt) - 1] == [IGNORED] * (len(prompt) - 1)
        trained = [(index, token) for index, token in enumerate(wanted) if token != IGNORED]
        assert [index for index, _ in trained] == list(range(len(prompt) - 1, len(prompt) - 1 + len(trained)))
        assert trained[-1][1] == tokenizer.eos_token_id
        assert all(row[index + 1] == token for index, token in trained)


lines = st.integers(2, 24)
digits = st.integers(0, 9)
problems = lines.flatmap(lambda count: st.builds(Problem, st.integers(0, 26 - count), st.just(count), digits, digits))
HARMLESS = 14  # lines after a slip at which its effect, the Fibonacci number 610, is a multiple of ten


def test_a_solution_reads_as_documented_and_a_row_has_what_verl_reads():
    problem = Problem(5, 4, 7, 3)
    chain = ["f 7+3 is 0", "g 3+0 is 3", "h 0+3 is 3", "i 3+3 is 6"]
    assert problem.solution(check=True).splitlines() == [*chain, "check", *chain, "answer: 6"]
    row = as_row(problem, "val", 3)
    assert row["prompt"] == [{"role": "user", "content": "from f to i begin 7 3"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "6"}
    assert row["extra_info"] == {"split": "val", "index": 3, "lines": 4}


@given(problems, st.data())
def test_a_slip_makes_the_answer_wrong_unless_a_check_repairs_it(problem, data):
    for check in (False, True):
        assert score_solution(problem.solution(check=check), problem.answer) == (True, problem.answer)
    slip = data.draw(st.integers(0, problem.lines - 1))
    right = problem.lines - 1 - slip == HARMLESS
    for solution in (problem.solution(slip), problem.solution(slip, check=True), problem.solution(slip, repair=True)):
        assert score_solution(solution, problem.answer)[0] == right
    assert score_solution(problem.solution(slip, check=True, repair=True), problem.answer)[0]


def test_splits_are_disjoint_and_repeat():
    settings = AssetSettings()
    train, validation = draw_splits(settings)
    assert (len(set(train)), len(set(validation))) == (2000, 64) and not set(train) & set(validation)
    assert draw_splits(settings) == (train, validation)
    assert draw_splits(AssetSettings(seed=1))[0] != train


def test_the_chat_template_is_qwens_and_the_longest_problem_fits():
    tokenizer, text = build_tokenizer(), "na\u00efve \u4e2d\u6587 \x00 +7-0"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    ids = encode_prompt(tokenizer, "from a to c begin 1 2")
    assert tokenizer.decode(ids) == "<|im_start|>user\nfrom a to c begin 1 2<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    response = encode_response(tokenizer, "answer: 55")
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(response, skip_special_tokens=True) == "answer: 55"
    problem = Problem(2, 24, 9, 9)
    assert len(encode_prompt(tokenizer, problem.question)) <= 128
    assert len(encode_response(tokenizer, problem.solution(check=True))) <= 640
