"""A session for drafts that a device makes: it says a step ahead how long they are, and learns what came of them late.

It waits for no step. Which tokens are drafted it does not know, so that it expects of a request's drafts what came of
those before.
"""

import itertools
import operator
import time

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.position_acceptance import PositionAcceptance
from sam.drafting.texts import Drafts
from sam.engine.requests import Step, Text
from sam.engine.session import STEPS_UNDER_WAY, Session


class LateSession(Session):
    """As Session; its drafts are places, token 0 each, and `draft` is called before the step's tokens are
    drawn, `stepped` when their copy has begun."""

    def __init__(self, config: SpeculationConfig, drafter: Drafter, *further):
        super().__init__(config, drafter, *further)
        self._accepted = PositionAcceptance(drafter.max_draft_tokens)
        self._newest: Step | None = None  # of the steps whose tokens have come to the host

    def started(self, request_id: str, text: Text) -> None:
        """Follow a new request before the steps under way are read: its first ones have drafts, too."""
        if request_id in self.texts:
            super().started(request_id, text)
        else:
            self._follow(request_id, text)

    def follows(self, request_ids: list[str]) -> np.ndarray:
        """bool [requests]."""
        return np.array([name in self.texts for name in request_ids], dtype=bool)

    def weights_updated(self) -> None:
        """As Session.weights_updated; what was accepted under older weights says less."""
        super().weights_updated()
        self._accepted.weights_updated()

    def _draft(self, step: Step, *_) -> dict[str, list[int]]:
        now = time.perf_counter()
        steps = [entry for entry in self._unread if isinstance(entry, Step)]
        newest_first = (earlier.copied.query() for earlier in reversed(steps))  # copies end in order
        under_way = sum(1 for _ in itertools.takewhile(operator.not_, newest_first))
        if not self.switch.holds(now, len(step.request_ids)):
            self._observe(now, steps[: len(steps) - under_way])
            self.switch.plan(now, self.state_of(step), sorted(step.request_ids))
        plan = self.switch.last.plan
        if plan.budget:
            self.read(under_way)
        elif self._is_due(now):
            self.read(STEPS_UNDER_WAY)
        has_drafts = self.follows(step.request_ids) & step.emits & (plan.budget > 0)
        names = np.array(step.request_ids)[has_drafts].tolist()
        if not names:
            return {}
        drafts = self.switch.cut(self._expected(names, plan.budget, plan.min_acceptance))
        return {name: draft for name, draft in zip(names, drafts, strict=True) if draft}

    def _observe(self, now: float, arrived: list[Step]) -> None:
        """Give the policy the time since it was asked: that of the step that ended on the device meanwhile, which is
        not the one that the host has begun. If two have ended, or none, it is nobody's."""
        if not arrived:
            return
        before = self._newest
        self._newest = step = arrived[-1]
        is_next = before is not None and (len(arrived) == 1 or arrived[-2] is before)
        if is_next and self.switch.last.state is not None:
            drafted = int(step.verified.sum()) if step.had_drafts else 0
            accepted = int(step.counts.sum() - step.emits.sum())
            milliseconds = (now - self.switch.last.began) * 1e3
            self.switch.policy.observe(self.state_of(step), drafted, accepted, milliseconds)

    def _expected(self, names: list[str], budget: int, min_acceptance: float) -> Drafts:
        """Places for drafts, up to those that are less likely to be accepted than `min_acceptance`."""
        shares = self._accepted.expected(names)[:, :budget].astype(np.float32)
        is_likely = shares >= min_acceptance  # they fall from place to place
        offsets = np.cumsum([0, *is_likely.sum(axis=1)])
        return Drafts(np.zeros(offsets[-1], np.int32), offsets, shares[is_likely])

    def _take(self, step: Step) -> None:
        super()._take(step)
        if step.had_drafts:
            for name, verified, count in zip(step.request_ids, step.verified, step.counts, strict=True):
                if verified and count and name in self.texts:
                    self._accepted.add(name, int(verified), int(count) - 1)

    def _finish(self, names: set[str]) -> None:
        super()._finish(names)
        self._accepted.keep_only(self.texts)
