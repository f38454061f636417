"""What drafting for one engine needs beside the engine: a drafter, its history, its switch, and where faults end."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.switch import StepResult, Switch
from sam.guard import guard
from sam.history.client import HistoryClient
from sam.sharing.client import INTERVAL_SECONDS
from sam.sharing.drafter import read_corpus_into, share_by_link
from sam.switch.policies import Policy, make_policy, warm_up

logger = logging.getLogger(__name__)

COUNTERS = ("tracked_requests", "untracked_requests", "draft_errors", "skipped_steps", "policy_version")
# Steps without drafts after which the drafter is given the tokens of all of them at once.
MAX_STEPS_BEHIND = 32


class Session:
    """Of one engine. An error in drafting never fails or changes a rollout: the step goes on without drafts, and the
    error is counted in `counters["draft_errors"]` and logged once.

    Args:
        drafter: follows the engine's requests.
        goodput_only: further arguments of sam.switch.policies.make_policy.

    Attributes:
        counters: those of COUNTERS, and the drafter's own: everything in it goes to the metrics.
        history: None without one.
        shares_at: seconds from which on new text is to be sent to other replicas.
        switch: says what is drafted.
    """

    def __init__(self, config: SpeculationConfig, drafter: Drafter, goodput_only: dict):
        self.config = config
        self.drafter = drafter
        self.counters = drafter.counters
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        policy = make_policy(config.policy, drafter.max_draft_tokens, config.batch_size_threshold, **goodput_only)
        self.switch = Switch(policy, self.counters)
        self.history: HistoryClient | None = None
        self.shares_at = math.inf

    def warm_up(self) -> None:
        """Compile the kernels, so that no step waits for them."""
        started = time.perf_counter()
        self.drafter.warm_up()
        warm_up()
        logger.info("drafter compiled in %.1f s", time.perf_counter() - started)

    def begin(self, model_config) -> None:
        """Read what the drafter is to know before the first request, on the rank that drafts; `model_config` is vLLM's.

        Raises:
            ReadError: the corpus cannot be read, or is of another tokenizer.
        """
        read_corpus_into(self.drafter, self.config, model_config)
        self.history = HistoryClient.of_engine(self.config, model_config, self.counters)
        if self.history:
            self.history.start()

    def harmless(self) -> AbstractContextManager[None]:
        """Count what fails: the rollout goes on without drafts."""
        return guard(logger, self.counters, "draft_errors", "drafting failed; the rollout goes on without drafts")

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas from now on, where speculation.sharing asks for it, by the
        address at which the replica's server listens (sam.sharing.link)."""
        if share_by_link(self.drafter, address):
            self.shares_at = 0.0

    def deliver(self, now: float) -> None:
        """Give the drafter what its history has found; it is about to be told of new text, at `now` seconds."""
        if self.shares_at < math.inf:
            self.shares_at = now + INTERVAL_SECONDS
        if self.history:
            self.history.deliver(self.drafter)

    def start_request(self, request_id: str, prompt: np.ndarray, given: np.ndarray) -> bool:
        """Follow a request with `prompt`, which goes on with `given` (both int32 [length]); False if it cannot be."""
        try:
            if self.history:
                self.history.request_started(request_id, prompt, self.drafter)
            self.drafter.start(request_id, prompt, given)
        except ValueError as error:
            if self.counters["untracked_requests"] == 0:
                logger.warning("no drafts for a request: %s (logged once, then counted)", error)
            self.counters["untracked_requests"] += 1
            if self.history:
                self.history.request_finished(request_id, [])
            return False
        self.counters["tracked_requests"] += 1
        return True

    def end_request(self, request_id: str, response: list[int]) -> None:
        """A request is gone; an empty response is not kept."""
        self.drafter.finish(request_id)
        if self.history:
            self.history.request_finished(request_id, response)

    def weights_updated(self, read: Callable[[], None]) -> None:
        """Count a weight sync: the history keeps responses by their weights, those that `read` still finds too, since
        no step comes after the responses that end last."""
        self.counters["policy_version"] += 1
        if self.history:
            with self.harmless():
                read()
            self.history.weights_updated()


class Drafting:
    """What drafts by a `session`, as others see it, whichever model runner it serves."""

    session: Session

    @property
    def counters(self) -> dict[str, int]:
        """Of the session: everything in it goes to the metrics."""
        return self.session.counters

    @property
    def drafter(self) -> Drafter:
        """That follows the engine's requests."""
        return self.session.drafter

    @property
    def policy(self) -> Policy:
        """That says what is drafted."""
        return self.session.switch.policy

    @property
    def last(self) -> StepResult:
        """What the last step left behind."""
        return self.session.switch.last

    @property
    def wants_drafts(self) -> bool:
        """Whether the last plan asked for drafts."""
        return self.session.switch.wants_drafts
