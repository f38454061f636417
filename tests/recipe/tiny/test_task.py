"""The tiny task: solutions are right but for their slips, splits do not meet, and its tokenizer loses nothing."""

from hypothesis import given
from hypothesis import strategies as st

from sam_recipe.tiny.assets import AssetSettings, draw_splits
from sam_recipe.tiny.task import Problem, as_row, score_solution
from sam_recipe.tiny.tokenizer import build_tokenizer, encode_prompt, encode_response

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


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_chat_template_is_qwens_and_the_longest_problem_fits():
    tokenizer = build_tokenizer()
    ids = encode_prompt(tokenizer, "from a to c begin 1 2")
    assert tokenizer.decode(ids) == "<|im_start|>user\nfrom a to c begin 1 2<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    response = encode_response(tokenizer, "answer: 55")
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(response, skip_special_tokens=True) == "answer: 55"
    problem = Problem(2, 24, 9, 9)
    assert len(encode_prompt(tokenizer, problem.question)) <= 128
    assert len(encode_response(tokenizer, problem.solution(check=True))) <= 640
