"""The tiny task: a running total modulo 100, written out step by step and sometimes checked again.

A problem names its operands, `sum a47 b+8 c-9`. A solution restates them, carries the total from line to
line, may walk the chain a second time, and ends in the answer:

    given a47 b+8 c-9
    47 b+8=55
    55 c-9=46
    check
    47 b+8=55
    55 c-9=46
    answer: 46

Every operand changes the answer. Solutions written for the warm start contain slips (a carry forgotten or
invented), so that a model trained on them knows the skill and still errs at temperature 1: this is what
reinforcement learning then mends.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp
from random import Random
from string import ascii_lowercase

DATA_SOURCE = "tiny_running_total"
MODULUS = 100
MAX_OPERANDS = 24
ANSWER_PATTERN = re.compile(r"answer: (\d\d)\Z")
PROBLEM_PATTERN = re.compile(r"sum a(\d\d)((?: [b-x][+-][1-9])+)")


@dataclass(frozen=True)
class TaskSettings:
    """What problems look like and how often written solutions slip.

    Attributes:
        min_operands: fewest operands of a problem, the starting value included.
        max_operands: most operands, at most 24 (one letter each).
        length_scale: operand counts fall off as exp(-operands / length_scale).
        slip_per_step: probability of a slip per step of a short problem.
        slip_limit: upper limit of the probability that a solution contains a slip.
        check_probability: share of solutions that walk the chain a second time.
        repair_probability: share of those second walks that compute the slipped step correctly.
    """

    min_operands: int = 2
    max_operands: int = MAX_OPERANDS
    length_scale: float = 9.0
    slip_per_step: float = 0.12
    slip_limit: float = 0.5
    check_probability: float = 0.4
    repair_probability: float = 0.6

    def __post_init__(self) -> None:
        if not 2 <= self.min_operands <= self.max_operands <= MAX_OPERANDS:
            raise ValueError(
                f"operands from {self.min_operands} to {self.max_operands}: "
                f"expected 2 <= min_operands <= max_operands <= {MAX_OPERANDS}"
            )
        if self.length_scale <= 0:
            raise ValueError(f"length_scale is {self.length_scale}: expected a positive number of operands")
        for name in ("slip_per_step", "slip_limit", "check_probability", "repair_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a probability from 0 to 1")


@dataclass(frozen=True)
class Problem:
    """A starting value in 0..99 and the signed operands (-9..-1 or 1..9) added to it in turn."""

    start: int
    operands: tuple[int, ...]

    @property
    def question(self) -> str:
        """The user's message."""
        return f"sum {self._listing()}"

    @property
    def answer(self) -> str:
        """The right answer, two digits."""
        return f"{(self.start + sum(self.operands)) % MODULUS:02d}"

    def _listing(self) -> str:
        named = [
            f"{letter}{operand:+d}"
            for letter, operand in zip(ascii_lowercase[1:], self.operands, strict=False)
        ]
        return " ".join([f"a{self.start:02d}", *named])

    def solution(self, slip: int | None = None, check: bool = False, repair: bool = False) -> str:
        """The written answer.

        Args:
            slip: index of the step whose carry goes wrong; the wrong total is carried on. None: no slip.
            check: walk the chain a second time.
            repair: the second walk computes the slipped step correctly.
        """
        lines, total = self._walk(slip)
        if check:
            again, total = self._walk(None if repair else slip)
            lines += ["check", *again]
        return "\n".join([f"given {self._listing()}", *lines, f"answer: {total:02d}"])

    def _walk(self, slip: int | None) -> tuple[list[str], int]:
        lines, total = [], self.start
        for step, operand in enumerate(self.operands):
            result = (total + operand) % MODULUS
            if step == slip:
                result = slipped(total, operand)
            lines.append(f"{total:02d} {ascii_lowercase[step + 1]}{operand:+d}={result:02d}")
            total = result
        return lines, total


def slipped(total: int, operand: int) -> int:
    """One step, modulo 100, with a due carry (borrow) forgotten, or one invented where none is due."""
    carries = not 0 <= total % 10 + operand <= 9
    direction = 1 if operand > 0 else -1
    return (total + operand + (-10 if carries else 10) * direction) % MODULUS


def parse_question(question: str) -> Problem:
    """The problem a question asks.

    Raises:
        ValueError: the text is not a question of this task.
    """
    match = PROBLEM_PATTERN.fullmatch(question)
    if match is None:
        raise ValueError(f"question is {question!r}: expected a text like 'sum a47 b+8 c-9'")
    return Problem(int(match[1]), tuple(int(operand[1:]) for operand in match[2].split()))


def draw_problem(random: Random, settings: TaskSettings) -> Problem:
    """A random problem; short ones are more frequent, the tail reaches max_operands."""
    counts = range(settings.min_operands, settings.max_operands + 1)
    weights = [exp(-count / settings.length_scale) for count in counts]
    count = random.choices(counts, weights)[0]
    operands = tuple(random.choice((-1, 1)) * random.randint(1, 9) for _ in range(count - 1))
    return Problem(random.randrange(MODULUS), operands)


def draw_problems(
    random: Random, settings: TaskSettings, excluded: Iterable[Problem] = ()
) -> Iterator[Problem]:
    """An endless stream of different problems, none of them among `excluded`."""
    seen = set(excluded)
    while True:
        problem = draw_problem(random, settings)
        if problem not in seen:
            seen.add(problem)
            yield problem


def draw_solution(random: Random, settings: TaskSettings, problem: Problem) -> str:
    """A solution as the warm start shows it: with a slip now and then, and now and then checked."""
    steps = len(problem.operands)
    slips = random.random() < min(settings.slip_limit, settings.slip_per_step * steps)
    slip = random.randrange(steps) if slips else None
    check = random.random() < settings.check_probability
    repair = random.random() < settings.repair_probability
    return problem.solution(slip, check, repair)


def score_solution(solution: str, ground_truth: str) -> tuple[bool, str]:
    """Whether the last line states the right answer, and the answer it states (empty if it states none)."""
    match = ANSWER_PATTERN.search(solution.strip())
    predicted = match[1] if match else ""
    return predicted == ground_truth, predicted


def as_row(problem: Problem, split: str, index: int) -> dict:
    """A problem as a row of verl's parquet format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "operands": len(problem.operands) + 1},
    }
