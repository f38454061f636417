import pytest

from recipe.tiny.task import DATA_SOURCE, Problem
from recipe.trainer.reward import compute_score

PROBLEM = Problem(5, 4, 7, 3)


def test_right_tiny_answer_scores_plus_one():
    result = compute_score(DATA_SOURCE, PROBLEM.solution(), PROBLEM.answer, {"lines": 4})
    assert result == {"score": 1.0, "acc": 1.0, "pred": "6"}


@pytest.mark.parametrize(
    ("solution", "predicted"),
    [
        (PROBLEM.solution(slip=0), "9"),
        ("", ""),
        ("f 7+3 is 0", ""),
        ("answer: 6\nand more", ""),
        ("answer: 06", ""),
        ("answer: 6 answer: 7", "7"),
    ],
)
def test_wrong_or_missing_tiny_answer_scores_minus_one(solution, predicted):
    assert compute_score(DATA_SOURCE, solution, PROBLEM.answer) == {
        "score": -1.0,
        "acc": 0.0,
        "pred": predicted,
    }


@pytest.mark.parametrize("source", ["math_dapo", "aime2024"])
def test_math_goes_through_verls_scorer(source):
    right = compute_score(source, "So it is 17.\nAnswer: $34$", "34")
    wrong = compute_score(source, "So it is 17.\nAnswer: 35", "34")
    silent = compute_score(source, "I do not know", "34")
    assert right == {"score": 1.0, "acc": 1.0, "pred": "34"}
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "35"}
    assert silent == {"score": -1.0, "acc": 0.0, "pred": ""}


def test_gsm8k_goes_through_verls_scorer():
    right = compute_score("openai/gsm8k", "6 * 200\n#### 1,200", "1200")
    wrong = compute_score("openai/gsm8k", "#### 1201", "1200")
    silent = compute_score("openai/gsm8k", "it is 1200", "1200")
    assert right == {"score": 1.0, "acc": 1.0, "pred": "1200"}
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "1201"}
    assert silent == {"score": -1.0, "acc": 0.0, "pred": ""}


def test_verls_extra_arguments_are_accepted():
    result = compute_score(
        data_source=DATA_SOURCE,
        solution_str=PROBLEM.solution(check=True),
        ground_truth=PROBLEM.answer,
        extra_info=None,
        reward_router_address="host:1",
        reward_model_tokenizer=None,
    )
    assert result["acc"] == 1.0


def test_unknown_source_is_named():
    with pytest.raises(ValueError, match="data_source is 'chess': expected one of tiny_additive_sequence"):
        compute_score("chess", "", "")
