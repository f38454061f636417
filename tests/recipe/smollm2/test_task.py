"""Tasks of reasoning-gym: rows as verl reads them, and answers judged as reasoning-gym judges them."""

import json
from itertools import islice

import pytest

from sam_recipe.smollm2.task import SOURCE_PREFIX, TASKS, draw_rows, score_solution
from sam_recipe.trainer.reward import compute_score


@pytest.mark.parametrize(
    ("solution", "predicted"),
    [
        ("5 + 9 = 14\n#### 14", "14"),
        ("5 + 9 = 14\n#### 14 \n", "14"),
        ("#### 14\n#### 15", "15"),
        ("#### 14\nor not", ""),
        ("5 + 9 #### 14", ""),
        ("#### 14 or 15", ""),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_line(solution, predicted):
    assert score_solution(solution, "14") == (predicted == "14", predicted)


def test_the_reward_knows_the_tasks():
    assert compute_score(f"{SOURCE_PREFIX}needle_haystack", "#### Jo", "Jo") == {"score": 1.0, "acc": 1.0, "pred": "Jo"}
    assert compute_score(f"{SOURCE_PREFIX}chain_sum", "it is 3", "3") == {"score": -1.0, "acc": 0.0, "pred": ""}


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_verls_and_judged_as_reasoning_gym_judges(name):
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="requirements/smollm2.txt is not installed")
    problems = reasoning_gym.create_dataset(name, seed=5, size=1000, **TASKS[name].settings)
    rows = list(islice(draw_rows(name, 5), 100))
    assert len({json.dumps(row["prompt"]) for row in rows}) == 100
    for row in rows:
        problem = problems[row["extra_info"]["index"]]
        truth = row["reward_model"]["ground_truth"]
        *shown, question = row["prompt"]
        assert question == {"role": "user", "content": problem["question"].strip()} and truth == problem["answer"]
        assert [message["role"] for message in shown] == ["user", "assistant"] * len(TASKS[name].examples)
        for answer in (truth, f"{truth}1", "no"):
            right = problems.score_answer(answer, problem) == 1.0
            assert compute_score(row["data_source"], f"work\n#### {answer}", truth)["acc"] == right
