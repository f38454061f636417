"""Rule-based rewards in the form verl's reward managers call: +1 for a right answer, -1 otherwise."""

from typing import Any

from recipe.sam_dapo.smollm2 import task as smollm2_task
from recipe.sam_dapo.tiny import task as tiny_task

GSM8K = "openai/gsm8k"
MATH_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float | str]:
    """Score one response's text, without special tokens. `extra_info` and `kwargs` are what verl passes besides.

    Returns:
        score: +1.0 or -1.0; acc: 1.0 or 0.0; pred: the answer found in the response, empty if there is none.

    Raises:
        ValueError: no scorer is known for `data_source`.
    """
    correct, predicted = _judge(data_source, solution_str, ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": 1.0 if correct else 0.0, "pred": predicted}


def knows(data_source: str) -> bool:
    """Whether `compute_score` can judge a data source's responses."""
    known = (tiny_task.DATA_SOURCE, GSM8K, *MATH_SOURCES)
    return data_source in known or str(data_source).startswith((smollm2_task.SOURCE_PREFIX, "aime"))


def _judge(data_source: str, solution: str, ground_truth: str) -> tuple[bool, str]:
    if not knows(data_source):
        known = ", ".join((tiny_task.DATA_SOURCE, f"{smollm2_task.SOURCE_PREFIX}...", *MATH_SOURCES, "aime...", GSM8K))
        raise ValueError(f"data_source is {data_source!r}: expected one of {known}; name one of these in the data")
    if data_source == tiny_task.DATA_SOURCE:
        return tiny_task.score_solution(solution, ground_truth)
    if data_source.startswith(smollm2_task.SOURCE_PREFIX):
        return smollm2_task.score_solution(solution, ground_truth)
    # verl is imported where it is needed: it takes seconds to load.
    if data_source == GSM8K:
        from verl.utils.reward_score import gsm8k

        predicted = gsm8k.extract_solution(solution)
        return gsm8k.compute_score(solution, ground_truth) == 1.0, predicted or ""
    from verl.utils.reward_score import math_dapo

    result = math_dapo.compute_score(solution, ground_truth)
    return bool(result["acc"]), "" if result["pred"] in (None, "[INVALID]") else str(result["pred"])
