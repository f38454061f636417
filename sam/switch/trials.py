"""Whether a draft model's passes make the engine faster, held against what another source does without them.

Two ways take turns: stretches of steps in which passes may be made, and stretches without any. Tokens and time of both
are measured, everything included. The slower way is tried now and then, and a trial must not cost more than a share of
the time until the next: it ends as soon as it is clearly behind (a sequential test), and the rest after it is as long
as its loss asks for. What pays for one request need not pay for many, so each size of the batch in powers of two has
its own verdict, and begins with that of the nearest size. A draft model that comes back has to read what it has missed:
a trial of passes waits until that is cheap, as when texts are new. Passes that are too dear for what they could bring
are neither tried nor kept.

Times are in plain steps, which draft nothing: they rise with the batch and its context as the engine's steps do.
"""

from collections.abc import Callable
from math import inf, sqrt

FIRST_STEPS = 8.0  # plain steps with passes before the first trial, where no other size says anything
TRIAL_STEPS, MIN_STEPS = 32.0, 6  # plain steps after which a trial ends, and engine steps that it has at least
CLEARLY = 2.5  # standard errors between the two ways that end a trial
LOSS_SHARE = 1 / 64  # of the plain steps from a trial to the next that the trial may have lost
MIN_PAUSE, MAX_PAUSE = 128.0, 4096.0  # plain steps between two trials; doubled at least after each lost one
CHECK_STEPS = 8.0  # plain steps after which a trial that was too dear is thought of again
MEMORY = 256.0  # plain steps of a way after which all before count half
KEEP = 0.5  # weight of a way's earlier stretches when it is tried again
# Of the time that a token takes without passes, what one pass may take for each request to be worth a trial. If all its
# tokens were accepted, and none were known to the other source, 8 passes would bring a fifth at 0.8; at 90 % acceptance
# they bring nothing there. Half allows for tokens that the other source knows, too.
HOPEFUL = 0.5
LONGEST = 20.0  # times a plain step that a token may take


class Way:
    """Tokens of a request and plain steps that the steps of one way took: their ratio, the speed, and its error."""

    def __init__(self):
        self.steps = 0
        self._tokens = self._plain = self._tokens2 = self._cross = self._plain2 = 0.0

    def add(self, tokens: float, plain: float) -> None:
        """A step brought `tokens` in the time of `plain` plain steps."""
        if self._plain > MEMORY:
            self.fade(0.5)
        self.steps += 1
        self._tokens, self._plain = self._tokens + tokens, self._plain + plain
        self._tokens2 += tokens * tokens
        self._cross += tokens * plain
        self._plain2 += plain * plain

    def fade(self, keep: float) -> None:
        """Let all steps so far count `keep` times, and begin to count steps anew."""
        self.steps = 0
        self._tokens, self._plain = keep * self._tokens, keep * self._plain
        self._tokens2, self._cross, self._plain2 = keep * self._tokens2, keep * self._cross, keep * self._plain2

    @property
    def speed(self) -> float:
        """Tokens of a request in the time of a plain step; infinite before any step."""
        return self._tokens / self._plain if self._plain > 0 else inf

    @property
    def variance(self) -> float:
        """Of `speed`, that of a ratio of two sums (Cochran, Sampling Techniques, 1977, ch. 6)."""
        if self._plain <= 0:
            return inf
        speed = self.speed
        return max(0.0, self._tokens2 - 2 * speed * self._cross + speed * speed * self._plain2) / self._plain**2


class Verdict:
    """Which way is faster for batches of one size.

    Args:
        passes: whether passes are thought to pay.
        pause: plain steps until the other way is tried.
        is_settled: whether that comes of a trial, of this size or of another.

    Attributes:
        allowed: whether passes may be made in the stretch under way.
        passes: whether the usual way is with passes; the other one needs a lead of more than its error to become it.
    """

    def __init__(self, passes: bool = True, pause: float = FIRST_STEPS, is_settled: bool = False):
        self.allowed = self.passes = passes
        self.is_settled = is_settled
        self.pause = self._left = pause
        self._ways = Way(), Way()  # without passes, with
        self._since = 0.0  # plain steps since the last trial
        self._took = self._brought = 0.0  # plain steps and tokens of the trial under way

    @property
    def is_trial(self) -> bool:
        """Whether the way that is not the usual one is being tried."""
        return self.allowed != self.passes

    def step(self, tokens: float, plain: float, price: Callable[[float], float], reading: float = 0.0) -> None:
        """A step has ended.

        Args:
            tokens: that it brought a request.
            plain: plain steps that it took.
            price: gives the plain steps in which the draft model reads so many tokens of each request, or all for inf;
                of one token each, those of a pass.
            reading: plain steps of `plain` in which it read such: the price of a trial, not of going on with passes.
        """
        counted = max(0.0, plain - reading) if self.is_trial else plain
        self._ways[self.allowed].add(tokens, counted)
        self._left -= counted
        if not self.is_trial:
            self._since += plain
            if self._left <= 0:
                self._try_other(price)
            return
        self._took, self._brought = self._took + plain, self._brought + tokens
        if self._ways[self.allowed].steps >= MIN_STEPS and (self._left <= 0 or abs(self.lead()) > CLEARLY):
            self._end_trial(price)

    def lead(self) -> float:
        """By how many standard errors passes are faster."""
        without, with_ = self._ways
        difference, error = with_.speed - without.speed, sqrt(without.variance + with_.variance)
        return difference / error if error > 1e-6 * abs(difference) else 1e6 * difference

    def _try_other(self, price: Callable[[float], float]) -> None:
        if not self.passes and self._since < MAX_PAUSE:
            is_dear = price(inf) > LOSS_SHARE * self._since
            if is_dear or not self._is_hopeful(price):
                self._left = CHECK_STEPS
                return
        self.allowed, self._left = not self.allowed, TRIAL_STEPS
        self._ways[self.allowed].fade(KEEP)
        self._took = self._brought = 0.0

    def _is_hopeful(self, price: Callable[[float], float]) -> bool:
        return price(1.0) * self._ways[False].speed <= HOPEFUL

    def _end_trial(self, price: Callable[[float], float]) -> None:
        tried, lead = self.allowed, self.lead() if self.allowed else -self.lead()
        to_read = 0.0 if tried else price(self._brought)  # what a trial without passes has let it miss
        lost = self._took + to_read - self._brought / self._ways[not tried].speed
        if not tried and lead > -CLEARLY and not self._is_hopeful(price):
            lead = inf  # what speaks for passes is noise
        if lead > 1.0 if self.is_settled else lead >= 0.0:
            self.passes, self.pause = tried, MIN_PAUSE
        else:
            longer = 2 * self.pause if lead < 0 else self.pause
            self.pause = min(MAX_PAUSE, max(longer, lost / LOSS_SHARE, MIN_PAUSE))
        self.allowed, self._left, self._since, self.is_settled = self.passes, self.pause, 0.0, True


class Trials:
    """A verdict for each size of the batch.

    Args:
        read_ms: gives the milliseconds that the draft model takes to read so many tokens; None: no time.

    Attributes:
        are_needed: whether there is another source, which the draft model could take tokens from.

    Example:
        >>> trials = Trials()
        >>> seconds, allowed = 0.0, True
        >>> for step in range(40):  # a token in 2 ms with passes and in 1 ms without
        ...     allowed = trials.step(1, context=float(step), plain_ms=1.0, now=seconds)
        ...     seconds += 0.002 if allowed else 0.001
        >>> allowed
        False
    """

    def __init__(self, read_ms: Callable[[int], float] | None = None):
        self.are_needed = False
        self._read_ms = read_ms or (lambda tokens: 0.0)
        self._of_size: dict[int, Verdict] = {}
        self._requests, self._context, self._at, self._reading_ms = 0, 0.0, 0.0, 0.0

    def read(self, milliseconds: float) -> None:
        """In the step under way the draft model spent so long on text that it had missed."""
        self._reading_ms = milliseconds

    def step(self, requests: int, context: float, plain_ms: float, now: float) -> bool:
        """A step has ended; returns whether passes may be made for the next.

        Args:
            requests: that run.
            context: their mean tokens.
            plain_ms: what a step of theirs without drafts takes.
            now: seconds, of any clock.
        """
        grown, plain = context - self._context, (now - self._at) * 1e3 / plain_ms
        verdict = self._of_size.get(requests.bit_length()) or self._begin(requests.bit_length())
        # Else some have come or gone, or the engine was idle.
        if requests == self._requests and requests * grown > requests - 0.5 and plain <= LONGEST * grown:

            def price(tokens: float) -> float:
                return self._read_ms(int(requests * min(tokens, context))) / plain_ms

            verdict.step(grown, plain, price, self._reading_ms / plain_ms)
        self._requests, self._context, self._at, self._reading_ms = requests, context, now, 0.0
        return verdict.allowed

    def _begin(self, size: int) -> Verdict:
        """With the verdict of the nearest size, which is checked the sooner the further that is."""
        known = [(abs(other - size), verdict) for other, verdict in self._of_size.items() if verdict.is_settled]
        verdict = Verdict()
        if known:
            distance, nearest = min(known, key=lambda one: one[0])
            verdict = Verdict(nearest.passes, max(MIN_PAUSE, nearest.pause / 2**distance), is_settled=True)
        self._of_size[size] = verdict
        return verdict
