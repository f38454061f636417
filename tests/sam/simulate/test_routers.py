"""Simulated routers, chunks and KV caches: rollouts small enough to be played by hand, and what must hold of all."""

import numpy as np
import pytest

from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.rollout import Choice, simulate
from sam.simulate.routing import ROUTERS
from sam.switch.step_cost import linear
from tests.sam.simulate.test_engine import ALL, COST, work

FLAT = linear(10.0, 0.0, 0.0)  # 10 ms, whatever runs


def play(rounds, router="context", chunk=0, policy="never", cost=FLAT, **cluster):
    rounds = rounds if isinstance(rounds, list) else [rounds]
    outcome, played = simulate(rounds, Cluster(**cluster), Choice(policy, router=router, chunk=chunk), cost, ALL, 1)
    return outcome, played


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("policy", ["never", "always"])
@pytest.mark.parametrize("lock_step", [False, True])
def test_every_token_is_generated_once(router, chunk, policy, lock_step):
    lengths = LogNormal(40, 200, 0.8, 0.5)
    rounds = [lengths.draw(6, 4, 9, seed) for seed in range(2)]
    cluster = {"replicas": 3, "max_num_seqs": 3, "dp_synchronous": lock_step, "kv_tokens": 300}
    outcome, _ = play(rounds, router, 0 if router == "verl" else chunk, policy, COST, **cluster)
    assert outcome.tokens == sum(one.num_tokens for one in rounds)


def test_a_probe_tells_which_group_is_long():
    """Two groups of three, two slots: the probes take 2 and 9 steps, then the long siblings go first."""
    one = work(2, 2, 2, 9, 9, 9, prompts=[0, 0, 0, 1, 1, 1])
    context, _ = play(one, replicas=1, max_num_seqs=2)
    assert context.seconds == pytest.approx(0.18)
    assert play(one, "verl", replicas=1, max_num_seqs=2)[0].seconds == pytest.approx(0.20)


def test_the_last_tenth_begins_when_nine_tenths_are_complete():
    outcome, _ = play(work(*range(1, 10), 25, prompts=range(10)), "verl", replicas=1, max_num_seqs=10)
    assert outcome.last_tenth_seconds == pytest.approx(0.25 - 0.09)


def test_chunks_go_to_the_emptier_replica():
    one = work(*[10] * 8, *[100] * 8, prompts=range(16))
    cluster = {"replicas": 2, "max_num_seqs": 8, "cost": linear(1.0, 0.0, 1.0)}
    whole, divided = (play(one, chunk=chunk, **cluster)[0] for chunk in (0, 10))
    assert whole.moves == 0 and divided.moves >= 0
    assert divided.seconds <= whole.seconds


def test_a_full_cache_preempts_and_reads_again_with_verls_router_and_holds_back_with_ours():
    one = work(*[40] * 6, prompts=range(6))
    cluster = {"replicas": 1, "max_num_seqs": 6, "kv_tokens": 100, "read_ms": 1.0}
    verl, _ = play(one, "verl", **cluster)
    ours, _ = play(one, "context", **cluster)
    free, _ = play(one, "verl", replicas=1, max_num_seqs=6, read_ms=1.0)
    assert verl.preempted > 0 and verl.read_again > 0
    assert ours.preempted == ours.read_again == 0
    assert free.seconds < verl.seconds


def test_reading_a_prompt_takes_its_time():
    assert play(work(1, prompt_tokens=50), read_ms=0.5)[0].seconds == pytest.approx((10 + 25) / 1e3)


def test_requests_that_come_later_wake_a_replica_that_sleeps():
    one = work(3, 3, prompts=[0, 1], arrivals=[0.0, 500.0])
    for router in ("verl", "context"):
        assert play(one, router)[0].seconds == pytest.approx(0.53)


def test_heavy_tails_end_sooner_with_the_recipes_router():
    lengths = LogNormal(400, 4000, 1.0, 0.8)
    rounds = [lengths.draw(24, 8, 16, seed) for seed in range(4)]
    cluster = {"replicas": 2, "max_num_seqs": 12, "cost": linear(5.0, 0.0, 0.1)}
    verl, context = (play(rounds, router, **cluster)[0].seconds for router in ("verl", "context"))
    assert context < verl
    assert np.isclose(play(rounds, "context", **cluster)[0].seconds, context), "it repeats"
