"""+1 for a right answer, -1 otherwise, of every data source; verl's scorers judge mathematics."""

import pytest

from recipe.sam_dapo.smollm2.task import SOURCE_PREFIX
from recipe.sam_dapo.tiny.task import DATA_SOURCE, Problem
from recipe.sam_dapo.trainer.reward import compute_score

PROBLEM = Problem(5, 4, 7, 3)
CHAIN = f"{SOURCE_PREFIX}chain_sum"


@pytest.mark.parametrize(
    ("source", "truth", "solution", "is_right", "found"),
    [
        (DATA_SOURCE, PROBLEM.answer, PROBLEM.solution(check=True), True, "6"),
        (DATA_SOURCE, PROBLEM.answer, PROBLEM.solution(slip=0), False, "9"),
        (DATA_SOURCE, PROBLEM.answer, "answer: 6\nand more", False, ""),
        (DATA_SOURCE, PROBLEM.answer, "answer: 06", False, ""),
        (DATA_SOURCE, PROBLEM.answer, "answer: 6 answer: 7", False, "7"),
        ("math_dapo", "34", "So it is 17.\nAnswer: $34$", True, "34"),
        ("math_dapo", "34", "So it is 17.\nAnswer: 35", False, "35"),
        ("aime2024", "34", "So it is 17.\nAnswer: $34$", True, "34"),
        ("aime2024", "34", "I do not know", False, ""),
        (CHAIN, "14", "5 + 9 = 14\n#### 14 \n", True, "14"),
        (CHAIN, "14", "#### 14\n#### 15", False, "15"),
        (CHAIN, "14", "#### 14\nor not", False, ""),
        (CHAIN, "14", "5 + 9 #### 14", False, ""),
        ("openai/gsm8k", "1200", "6 * 200\n#### 1,200", True, "1200"),
        ("openai/gsm8k", "1200", "I do not know", False, ""),
    ],
)
def test_an_answer_is_judged(source, truth, solution, is_right, found):
    verls = {"extra_info": {"lines": 4}, "reward_router_address": "host:1", "reward_model_tokenizer": None}
    result = compute_score(data_source=source, solution_str=solution, ground_truth=truth, **verls)
    assert result == {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": found}


def test_unknown_source_is_named():
    with pytest.raises(ValueError, match="data_source is 'chess': expected one of tiny_additive_sequence"):
        compute_score("chess", "", "")
