"""Which combinations `--identity` plays, and how it counts and shows equal responses."""

import argparse
import asyncio

from recipe.routing_bench import identity
from recipe.routing_bench.results import Rollout
from recipe.routing_bench.work import Work

OPTIONS = argparse.Namespace(chunk=[4, 8], replicas=2, groups=2, engines=["off", "sam", "shared"])


class Played:
    """Engines that emit the number of a request's prompt; `wrong` is a cell whose first response is another."""

    def __init__(self, wrong):
        self.wrong, self.calls = wrong, []

    def work(self, round_, first_prompt):
        return Work([[first_prompt], [first_prompt + 1]], [0, 0], [3, 9])

    async def run(self, variant, work, place):
        self.calls.append((variant.name, work.prompts[0][0]))
        responses = [list(prompt) for prompt in work.prompts]
        if variant.name == self.wrong:
            responses[0] = [-1]
        return Rollout(1.0, 1.0, 1.0, 0.0, 2, responses, [])


def play(wrong=None):
    engines = Played(wrong)
    result, text = asyncio.run(identity.play(OPTIONS, engines))
    return engines.calls, result["rows"], text


def test_every_cell_is_played_against_its_own_reference():
    calls, rows, text = play()
    # verl whole, and context whole and in two chunks: each on one replica without sharing and on two.
    assert len(rows) == 4 * 5 and all(row["identical"] for row in rows)
    drafting = [first for name, first in calls if not name.endswith("off") and name != "reference"]
    assert len(drafting) == len(set(drafting)) == 12, "no drafter sees a prompt twice"
    references = [first for name, first in calls if name == "reference"]
    assert sorted(references) == sorted({0, *drafting})
    assert "of 2 responses (1 of more than 4, 1 of more than 8 tokens)" in text
    assert text.count(identity.NO_CHUNKS) == 2 * 5, "verl's balancer divides nothing"


def test_one_different_response_is_counted():
    _, rows, text = play("context, 8, 1, sam")
    assert [row["equal"] for row in rows if not row["identical"]] == [1]
    line = next(line for line in text.splitlines() if line.startswith("context, chunks of 8"))
    assert line.split()[-5:] == ["2", "1", "2", "2", "2"]
