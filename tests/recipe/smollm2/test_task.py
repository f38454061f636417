"""Tasks of reasoning-gym: rows as verl reads them, and answers judged as reasoning-gym judges them."""

import json
from itertools import islice

import pytest

from sam_recipe.smollm2.task import TASKS, draw_rows
from sam_recipe.trainer.reward import compute_score


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
