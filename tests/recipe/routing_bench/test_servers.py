"""A step that is to last."""

import time

from recipe.routing_bench.servers import lasting


def test_both_parts_of_a_step_together_take_at_least_so_long():
    took = []
    execute, sample = lasting(lambda number: time.sleep(number), lambda number: number, seconds=0.05)
    for already in (0.0, 0.02, 0.08):
        began = time.monotonic()
        execute(already)
        assert sample(already) == already
        took.append(time.monotonic() - began)
    assert all(one >= 0.05 for one in took) and took[2] >= 0.08
