"""What a routing policy knows of replicas, groups and requests."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Replica:
    """An engine, its limits, and what the router has put there.

    Attributes:
        kv_tokens: tokens that its KV cache holds.
        slots: requests that run at once (vLLM's max_num_seqs).
        block_tokens: tokens of a block of the KV cache.
        ahead: requests beyond its slots that it is given to wait there.
        running: names of the requests that run there, or wait there for a slot.
        reserved: tokens of KV cache, in whole blocks, that these need to the end of their chunks.
    """

    name: str
    order: int
    kv_tokens: int
    slots: int
    block_tokens: int = 16
    ahead: int = 0
    running: set[str] = field(default_factory=set)
    reserved: int = 0
    alive: bool = True

    def blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks, in tokens."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a request that needs `tokens` to the end of its chunk has a slot and KV cache; alone it always fits,
        since vLLM itself refuses a max_model_len that its cache cannot hold."""
        if not self.alive or len(self.running) >= self.slots + self.ahead:
            return False
        return not self.running or self.reserved + self.blocks(tokens) <= self.kv_tokens

    @property
    def has_slot(self) -> bool:
        """Whether a request that comes would run at once."""
        return len(self.running) < self.slots

    @property
    def load(self) -> float:
        """The share of its slots or of its KV cache that is taken, whichever is larger."""
        return max(len(self.running) / self.slots, self.reserved / self.kv_tokens)


@dataclass(slots=True, eq=False)
class Group:
    """The requests of one prompt.

    Attributes:
        order: the order in which groups came.
        members: requests that have come and not finished.
        waiting: those that never started, in the order in which they came, and some that were given up.
        num_waiting: those of them that still wait.
        longest: tokens of the longest response so far, finished or not; or a length that was known beforehand.
        known: whether its responses' lengths can be estimated: one has finished, or they were known beforehand.
        prior: tokens that were expected beforehand; None: as many as of other groups.
        finished, log_sum: responses that have finished, and the sum of the logarithms of their lengths.
        estimate: tokens expected of a response, as of the last that finished; without one, `longest`.
        probe: the request that runs ahead of the others; None before it starts.
        home: the replica at which its last request started.
    """

    name: str
    order: int
    members: int = 0
    waiting: deque = field(default_factory=deque)
    num_waiting: int = 0
    longest: int = 0
    known: bool = False
    prior: int | None = None
    finished: int = 0
    log_sum: float = 0.0
    estimate: float = 0.0
    probe: str | None = None
    home: Replica | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One response to generate.

    Attributes:
        limit: most tokens of the response.
        generated: tokens that it has.
        order: the order in which requests began to wait; a request that goes on after a chunk begins again.
        since: admissions that there had been when it began to wait.
        replica: where it runs, or ran last.
        reserved: tokens reserved there while it runs.
        state: new, paused (between chunks or turns), running or gone.
        priority: that with which a paused request waits: the tokens that it is thought to lack, negative.
    """

    name: str
    group: Group
    prompt_tokens: int
    limit: int
    generated: int = 0
    order: int = 0
    since: int = 0
    replica: Replica | None = None
    reserved: int = 0
    state: str = "new"
    priority: int = 0

    @property
    def expected(self) -> int:
        """Tokens that a paused response is thought to come to."""
        return self.generated - self.priority
