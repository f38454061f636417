"""The tiny task: a sequence in which every number is the sum of the two before it, modulo 10.

A problem names its first and last line and the two numbers it begins with, `from f to i begin 7 3`. A solution
carries the numbers from line to line, may walk the chain a second time, and ends in the answer:

    f 7+3 is 0
    g 3+0 is 3
    h 0+3 is 3
    i 3+3 is 6
    check
    f 7+3 is 0
    g 3+0 is 3
    h 0+3 is 3
    i 3+3 is 6
    answer: 6

A slip on any line makes the answer wrong, except fourteen lines before the last one, where its effect is a multiple of
ten. Solutions written for the warm start contain slips (a line off by one), so that a model trained on them knows the
skill and still errs at temperature 1: this is what reinforcement learning then mends.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from random import Random
from string import ascii_lowercase

DATA_SOURCE = "tiny_additive_sequence"
MODULUS = 10
ANSWER_PATTERN = re.compile(r"answer: (\d)\Z")


@dataclass(frozen=True)
class TaskSettings:
    """What problems look like and how often written solutions slip."""

    min_lines: int = 2  # of a chain
    max_lines: int = 24  # at most: one letter each
    length_scale: float = 9.0  # line counts fall off as exp(-lines / length_scale)
    slip_per_line: float = 0.12  # probability, of a short chain
    slip_limit: float = 0.5  # of the probability that a solution contains a slip
    check_probability: float = 0.4  # share of solutions that walk the chain a second time
    repair_probability: float = 0.6  # share of those second walks that compute the slipped line correctly


@dataclass(frozen=True)
class Problem:
    """A chain from line `start` (0 is "a") over `lines` lines that begins with the numbers `first` and `second`."""

    start: int
    lines: int
    first: int
    second: int

    @property
    def letters(self) -> str:
        """The names of the lines, in order."""
        return ascii_lowercase[self.start : self.start + self.lines]

    @property
    def question(self) -> str:
        """The user's message."""
        return f"from {self.letters[0]} to {self.letters[-1]} begin {self.first} {self.second}"

    @property
    def answer(self) -> str:
        """The right answer, one digit."""
        return str(self._walk(None)[1])

    def solution(self, slip: int | None = None, check: bool = False, repair: bool = False) -> str:
        """The written answer. A slip on the line of that index is carried on; `check` walks the chain a second time,
        in which `repair` computes the slipped line correctly."""
        written, answer = self._walk(slip)
        if check:
            again, answer = self._walk(None if repair else slip)
            written += ["check", *again]
        return "\n".join([*written, f"answer: {answer}"])

    def _walk(self, slip: int | None) -> tuple[list[str], int]:
        written = []
        before = self.first
        last = self.second
        for line, letter in enumerate(self.letters):
            result = (before + last + (1 if line == slip else 0)) % MODULUS
            written.append(f"{letter} {before}+{last} is {result}")
            before = last
            last = result
        return written, last


def draw_problem(random: Random, settings: TaskSettings) -> Problem:
    """A random problem; short ones are more frequent, the tail reaches max_lines."""
    counts = range(settings.min_lines, settings.max_lines + 1)
    weights = [exp(-count / settings.length_scale) for count in counts]
    lines = random.choices(counts, weights)[0]
    start = random.randint(0, len(ascii_lowercase) - lines)
    return Problem(start, lines, random.randrange(MODULUS), random.randrange(MODULUS))


def draw_problems(random: Random, settings: TaskSettings) -> Iterator[Problem]:
    """An endless stream of different problems."""
    seen = set()
    while True:
        problem = draw_problem(random, settings)
        if problem not in seen:
            seen.add(problem)
            yield problem


def draw_solution(random: Random, settings: TaskSettings, problem: Problem) -> str:
    """A solution as the warm start shows it: with a slip now and then, and now and then checked."""
    slips = random.random() < min(settings.slip_limit, settings.slip_per_line * problem.lines)
    slip = random.randrange(problem.lines) if slips else None
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
        "extra_info": {"split": split, "index": index, "lines": problem.lines},
    }
