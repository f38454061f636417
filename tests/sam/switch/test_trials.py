"""Trials of a draft model: what they cost in simulated engines whose truth is known, and that they find it."""

import numpy as np
import pytest

from sam.switch import trials
from sam.switch.trials import LOSS_SHARE, MAX_PAUSE, MIN_PAUSE, Trials, Verdict, Way

PLAIN_MS, READ_MS = 2.0, 0.01  # a step without drafts, and a token that the draft model reads


class Engine:
    """Steps in which requests draw their tokens: `speed` tokens in a plain step's time without passes, `ratio` times as
    many with; a draft model that comes back reads what all requests have missed."""

    def __init__(self, ratio, speed=2.5, seed=0, read_ms=READ_MS):
        self.trials = Trials(lambda tokens: tokens * read_ms)
        self.random = np.random.default_rng(seed)
        self.ratio, self.speed, self.read_ms = ratio, speed, read_ms
        self.now = self.tokens = 0.0
        self.with_passes, self.missed, self.regret_ms = [], 0.0, 0.0

    def run(self, requests, steps, ratio=None):
        """Steps of one batch, from its beginning; returns in how many of the steps passes were allowed."""
        ratio = self.ratio if ratio is None else ratio
        best, context, count = self.speed * max(1.0, ratio), 60.0, 0
        self.missed = 0.0
        for _ in range(steps):
            allowed = self.trials.step(requests, context, PLAIN_MS, self.now)
            count += allowed
            plain = 2.6 if allowed else 1.6  # a step's time, of which drafts take their part
            mean = self.speed * plain * (ratio if allowed else 1.0)
            grown = (1.0 + self.random.poisson(mean - 1.0, requests)).mean()
            reading = self.missed * requests * self.read_ms if allowed else 0.0
            self.missed = 0.0 if allowed else self.missed + grown
            self.trials.read(reading)
            took = plain * PLAIN_MS + reading
            self.now, context = self.now + took / 1e3, context + grown
            self.tokens += grown
            self.regret_ms += took - mean / best * PLAIN_MS
        return count

    @property
    def regret(self):
        """Time that the better way would have saved, as a share of its own."""
        return self.regret_ms / (self.now * 1e3 - self.regret_ms)


RATIOS = (0.5, 0.8, 0.95, 1.0, 1.05, 1.2, 2.0)


@pytest.mark.parametrize("requests", [1, 24])
@pytest.mark.parametrize("ratio", RATIOS)
def test_regret_is_a_few_per_cent_whatever_the_truth(requests, ratio):
    regrets = []
    for seed in range(4):
        engine = Engine(ratio, seed=seed)
        for _ in range(15):
            engine.run(requests, 200)
        regrets.append(engine.regret)
    assert np.mean(regrets) < 0.025 and max(regrets) < 0.06


@pytest.mark.parametrize("ratio", [0.6, 0.8])
def test_batches_that_shrink_pay_for_one_verdict_not_for_one_of_each_size(ratio):
    """Rollouts of 24 requests that end one by one, as a bench plays them."""
    regrets = []
    for seed in range(4):
        engine = Engine(ratio, seed=seed)
        for _ in range(12):
            for requests in (24, 20, 12, 6, 3, 1):
                engine.run(requests, 15)
        regrets.append(engine.regret)
    assert np.mean(regrets) < 0.04


@pytest.mark.parametrize("requests", [1, 24])
def test_a_draft_model_that_begins_to_pay_is_found(requests):
    engine = Engine(0.6)
    engine.run(requests, 3000)
    assert engine.run(requests, 1000) < 40
    steps = int(2 * MAX_PAUSE)
    assert sum(engine.run(requests, 200, ratio=1.4) for _ in range(steps // 200)) > steps / 4
    assert engine.run(requests, 1000, ratio=1.4) > 900


def test_what_pays_for_one_request_need_not_pay_for_many():
    engine = Engine(1.5)
    for _ in range(10):
        engine.run(1, 100, ratio=1.5)
        engine.run(24, 100, ratio=0.6)
    assert engine.run(1, 100, ratio=1.5) > 90 and engine.run(24, 100, ratio=0.6) < 10


def step(verdict, tokens, plain=1.0, price=0.0, reading=0.0, one_pass=0.0):
    verdict.step(tokens, plain, lambda tokens: one_pass if tokens == 1.0 else price, reading)


def verdict_after(ratio, steps=40):
    """A verdict on two ways of constant speed, past its first trial."""
    verdict = Verdict()
    for _ in range(steps):
        step(verdict, 2.0 * (ratio if verdict.allowed else 1.0))
    return verdict


def test_a_trial_that_is_clearly_behind_ends_early():
    verdict, allowed = verdict_after(0.6), 0
    assert not verdict.passes and verdict.pause == MIN_PAUSE
    for _ in range(int(MIN_PAUSE) + 1):
        step(verdict, 1.2 if verdict.allowed else 2.0)
    while verdict.allowed:
        step(verdict, 1.2)
        allowed += 1
    assert allowed <= trials.MIN_STEPS < trials.TRIAL_STEPS


def test_rests_grow_with_each_lost_trial_and_with_its_price():
    verdict, pauses = verdict_after(0.6), []
    for _ in range(40_000):
        step(verdict, 1.2 if verdict.allowed else 2.0)
        if verdict.pause not in pauses:
            pauses.append(verdict.pause)
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE
    assert all(later >= 2 * earlier for earlier, later in zip(pauses[:-2], pauses[1:-1], strict=True))
    # A trial that took 100 plain steps for the tokens of 8 may only come again when that is a small share.
    dear = verdict_after(0.6)
    dear._left = 0.0
    step(dear, 2.0)
    assert dear.allowed
    step(dear, 1.2, 100.0, reading=99.0)
    while dear.allowed:
        step(dear, 1.2)
    assert dear.pause == MAX_PAUSE < 100.0 / LOSS_SHARE


def test_reading_what_was_missed_does_not_speak_against_passes():
    verdict = verdict_after(0.6)
    verdict._left, verdict.pause = 0.0, MIN_PAUSE
    step(verdict, 2.0)
    step(verdict, 4.0, 60.0, reading=59.0)
    for _ in range(50):
        step(verdict, 4.0 if verdict.allowed else 2.0)
    assert verdict.passes


def test_a_trial_waits_until_reading_what_was_missed_is_cheap():
    verdict, price = verdict_after(0.6), 5.0
    steps = 0
    while not verdict.allowed:
        step(verdict, 2.0, price=price)
        steps += 1
    assert 0.9 * price / LOSS_SHARE < steps < 1.2 * price / LOSS_SHARE
    dear = verdict_after(0.6)
    for _ in range(int(MAX_PAUSE) - 50):
        step(dear, 2.0, price=1e6)
        assert not dear.allowed
    for _ in range(100):  # but not for ever
        step(dear, 2.0, price=1e6)
    assert dear.allowed or dear.pause > MIN_PAUSE


def test_passes_that_are_too_dear_are_not_tried():
    """24 tokens in a pass of 0.96 plain steps, where 2.5 tokens of each request take one."""
    dear, cheap = Engine(0.6, read_ms=0.08), Engine(0.6)
    first, *later = [dear.run(24, 200) for _ in range(10)]
    assert first > sum(later) == 0
    assert sum([cheap.run(24, 200) for _ in range(10)][1:]) > 0


def test_passes_that_are_too_dear_are_not_kept_for_a_lucky_stretch():
    for one_pass, kept in ((0.1, True), (0.5, False)):
        verdict, lucky = Verdict(), (5.2, 0.0)
        for number in range(60):
            step(verdict, lucky[number % 2] if verdict.allowed else 2.0, one_pass=one_pass)
        assert verdict.passes == kept


def test_a_table_that_is_wrong_does_not_rule_passes_out_for_ever():
    verdict = verdict_after(0.6)
    for _ in range(int(2 * MAX_PAUSE)):
        step(verdict, 4.0 if verdict.allowed else 2.0, one_pass=0.5)
    assert verdict.passes


def test_equal_ways_are_left_to_the_cheaper_one():
    assert not verdict_after(1.0).passes


def test_the_error_of_a_speed_is_that_of_a_ratio():
    random, speeds = np.random.default_rng(0), []
    for _ in range(400):
        way = Way()
        for _ in range(20):
            plain = random.uniform(1.0, 3.0)
            way.add(2.0 * plain + random.normal(0, 0.5), plain)
        speeds.append(way.speed)
    assert np.sqrt(way.variance) == pytest.approx(np.std(speeds), rel=0.4)


def test_the_first_stretch_is_short():
    every, steps = Trials(), int(trials.FIRST_STEPS)
    allowed = [every.step(4, float(number), 1.0, number * 1e-3) for number in range(steps + 3)]
    assert all(allowed[:steps]) and not allowed[-1]
