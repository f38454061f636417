"""Drafters of several replicas, in this process."""

import numpy as np

from sam.sharing.drafter import SharingDrafter
from tests.sam import stepping
from tests.sam.sharing.channel import Channel, make_client, tokens

K = 3
NOTHING = np.zeros(0, np.int64), np.zeros(0, np.int64), tokens(), np.zeros(1, np.int64)  # an engine step of no request


class Replicas:
    """Drafters that share through one log."""

    def __init__(self, number=2, **settings):
        self.channel = Channel()
        self.drafters = [SharingDrafter(max_draft_tokens=K, **settings) for _ in range(number)]
        for drafter in self.drafters:
            drafter.share(make_client(self.channel))

    def exchange(self, rounds=2, seconds=0.05):
        """Between steps that append nothing and take nothing."""
        for _ in range(rounds):
            self.channel.clock.now += seconds
            for drafter in self.drafters:
                drafter.client.put("append", *NOTHING)
                drafter.client.exchange()


def step(drafter, request, *text, budget=K):
    drafts = stepping.step(drafter, [request], tokens(*text), np.array([0, len(text)]), np.array([budget], np.int32))
    return drafts.token_ids.tolist()
