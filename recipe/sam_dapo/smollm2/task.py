"""Verifiable tasks of reasoning-gym, so easy that a model of 135 M parameters solves some of them.

The model does not follow instructions about the form of an answer; it follows examples, so every prompt begins with two
solved problems. A solution works in lines and ends in the answer:

    5 + 9 = 14
    14 + 7 = 21
    #### 21
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

SOURCE_PREFIX = "reasoning_gym/"
ANSWER_PATTERN = re.compile(r"^#### ?(\S+)\Z", re.MULTILINE)
LARGEST = 100_000  # problems that are looked at for different ones


@dataclass(frozen=True)
class Task:
    """Settings of a generator of reasoning-gym, and problems of it with solutions."""

    settings: dict[str, int]
    examples: tuple[tuple[str, str], ...]


TASKS = {
    "chain_sum": Task(
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        (
            ("State the final answer to the following arithmetic problem: 3 + 4 - 2 =", "3 + 4 = 7\n7 - 2 = 5\n#### 5"),
            ("State the final answer to the following arithmetic problem: 9 + 6 =", "9 + 6 = 15\n#### 15"),
        ),
    ),
    "needle_haystack": Task(
        {"min_num_statements": 2, "max_num_statements": 4},
        (
            (
                "Mila adores playing chess. Igor rejects the color blue. Jo loathes baking bread. Zane likes "
                "rabbits. \nWho loathes baking bread? Reply only with a name.",
                "Mila adores playing chess: no.\nIgor rejects the color blue: no.\nJo loathes baking bread: yes.\n"
                "Zane likes rabbits: no.\n#### Jo",
            ),
            (
                "Omar endures mopping the floor. Pia reveres pandas. Luis shrugs off hiking. Vera craves the color "
                "pink. Noel hates snow. \nWho reveres pandas? Reply only with a name.",
                "Omar endures mopping the floor: no.\nPia reveres pandas: yes.\nLuis shrugs off hiking: no.\n"
                "Vera craves the color pink: no.\nNoel hates snow: no.\n#### Pia",
            ),
        ),
    ),
}


def score_solution(solution: str, ground_truth: str) -> tuple[bool, str]:
    """Whether the last line states the right answer, and the answer it states (empty if it states none)."""
    match = ANSWER_PATTERN.search(solution.strip())
    predicted = match[1] if match else ""
    return predicted == ground_truth, predicted


def draw_rows(name: str, seed: int) -> Iterator[dict]:
    """Different problems of one of TASKS as rows of verl's parquet format, 100,000 at most."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of a package that it imports
        import reasoning_gym
    task = TASKS[name]
    seen = {question for question, _ in task.examples}
    shown = [
        {"role": role, "content": text}
        for example in task.examples
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    for index, entry in enumerate(reasoning_gym.create_dataset(name, seed=seed, size=LARGEST, **task.settings)):
        question = entry["question"].strip()
        if question not in seen:
            seen.add(question)
            yield {
                "data_source": SOURCE_PREFIX + name,
                "prompt": [*shown, {"role": "user", "content": question}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
                "extra_info": {"index": index},
            }
