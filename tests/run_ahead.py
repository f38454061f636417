"""`python -m tests.run_ahead`: what text written ahead would bring to a rollout, by simulation; nothing of it is built.

In slots that stand free the next step's prompts would be decoded: never samples, text to draft from. A step takes as
many such rows as make it at most 2 % longer; a row costs what a request does or, beside drafts, what a draft token
does. `free`: eight responses of every prompt at no cost, the most that can come of it. `--measure RECORDING` prints
the acceptance lengths that UPLIFT is made of, from a recording of two epochs.
"""

import argparse
from bisect import bisect_right
from functools import cache
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np

from sam.record.responses import read_recording
from sam.replay import Replay, make_drafter
from sam.simulate import rollout, workload
from sam.simulate.rollout import CAP, CORRELATION, SAMPLES, SETUPS, SIGMA, Choice, Cluster
from sam.switch import step_cost

EARLIER, MOST, LONGER = (0, 1, 2, 4, 8), 8, 1.02  # responses of a prompt from the step before; of a step's time
# Tokens accepted of a draft beside so many earlier responses, over those beside none, by draft tokens.
UPLIFT = {3: (1, 1.055, 1.091, 1.136, 1.188), 8: (1, 1.069, 1.115, 1.172, 1.241)}
BYTES, OPERATIONS = 0.5 * 3.35e9, 0.5 * 0.99e12  # of an H100 in a millisecond, half of its peak
# An eighth of Seer's (arXiv 2511.14617): cards of one, replicas, prompts, samples, cap and mean tokens; bytes of
# weights, active parameters, share of the experts in a token, bytes of a token's KV cache.
SEER = {
    "Moonlight": (1, 4, 50, 8, 65536, 22386, 32e9, 3e9, 6 / 64, 31104),
    "Qwen2-VL-72B": (8, 2, 75, 16, 40960, 7615, 146e9, 72e9, 1.0, 327680),
    "Kimi-K2": (32, 1, 100, 8, 98304, 38959, 1.03e12, 32e9, 8 / 384, 70272),
}


def measure(path: Path, k: int) -> list[float]:
    """Mean acceptance length in the second epoch, beside EARLIER responses of the first."""
    (first, second), found = read_recording(path).by_epoch(), []
    for count in EARLIER:
        replay = Replay(k)
        for prompt, earlier, live in zip(first.prompts, first.responses, second.responses, strict=True):
            drafter = make_drafter("sam", "history", k)
            for name, text in enumerate(earlier[:count]):
                drafter.start(f"earlier/{name}", prompt)
                drafter.append([f"earlier/{name}"], text, np.array([0, len(text)]))
                drafter.finish(f"earlier/{name}")
            replay.group([drafter], "live", prompt, live, [()] * len(live))
        found.append(round(replay.tokens / replay.steps, 3))
    return found


def set_up(name: str, scale: int):
    """Cluster, step costs, prompts, samples, k, and log-normal lengths; tokens divided by `scale`."""
    if name not in SEER:
        cluster, prompts, k, _ = SETUPS[name.removesuffix("_cautious")]
        cost = rollout.load_step_cost(name)
        cells, mean = (cost.requests, cost.tokens_per_request), cost.fingerprint["mean_response_tokens"]
        cost = step_cost.StepCost(*cells, np.maximum(1, cost.context // scale), cost.milliseconds)
        return cluster, cost, prompts, SAMPLES, k, (mean / scale, CAP // scale, SIGMA, CORRELATION)
    cards, replicas, prompts, samples, cap, mean, weights, active, experts, kv = SEER[name]
    axes = np.array([1, 2, 4, 8, 16, 32, 64, 256, 1024]), np.arange(1, 10), np.array([1, cap // scale])
    requests, tokens, context = np.meshgrid(*axes, indexing="ij")
    read = weights * (1 - (1 - experts) ** (requests * tokens)) + kv * scale * requests * context
    cells = 5.0 + (read / BYTES + 2 * active * requests * tokens / OPERATIONS) / cards
    cluster = Cluster(replicas, int((0.9 * 80e9 * cards - weights) / kv / mean))
    return cluster, step_cost.StepCost(*axes, cells), prompts, samples, 8, (mean / scale, cap // scale, 0.8, 0.75)


@cache
def likelier(k: int, times: float) -> np.ndarray:
    """int64 [records]: a record of the same cell for each, such that `times` as many tokens are accepted."""
    table, low, high = workload.shipped_acceptance(k), 0.0, 20.0
    found = np.arange(len(table.accepted))
    for _ in range(16 if times > 1 else 0):
        power = (low + high) / 2
        for start, size in set(table.cells.ravel().tolist()):
            own = start + np.argsort(table.acceptance[start : start + size].sum(axis=1), kind="stable")
            found[own] = own[(size * ((np.arange(size) + 0.5) / size) ** (1 / (1 + power))).astype(int)]
        low, high = (power, high) if table.accepted[found].mean() < times * table.accepted.mean() else (low, power)
    return found


class EarlierDrafts(workload.DrawnDrafts):
    """Drawn beside earlier responses of `written` tokens (int64 [prompts, 8]), each a share of a request's own text."""

    def __init__(self, k: int, written: np.ndarray, *settings):
        super().__init__(workload.shipped_acceptance(k), *settings)
        self._written, self._likelier = written, np.array([likelier(k, times) for times in UPLIFT[k]])

    def draft(self, requests, generated, budgets, min_acceptance):
        super().draft(requests, generated, budgets, min_acceptance)
        shares = np.minimum(1.0, self._written[self._prompts[requests]] / np.maximum(1, generated)[:, None])
        levels, table = np.searchsorted((0.5, 2**0.5, 8**0.5, 32**0.5), shares.sum(axis=1), side="right"), self._table
        self._records = self._likelier[levels, self._records]
        acceptance, longest = table.acceptance[self._records], np.minimum(budgets, table.drafted[self._records])
        kept = (np.arange(acceptance.shape[1]) < longest[:, None]) & (acceptance >= min_acceptance)
        return acceptance[kept], np.append(0, np.cumsum(kept.sum(axis=1)))


class Engine(rollout.Engine):
    """Writes ahead in free slots as long as `lacking` tokens, of all engines, is above 0."""

    lacking = 0

    def advance(self, may_jump):
        began, emitted = self.clock, super().advance(may_jump)
        end, steps, *counts = self.timeline[-1]
        longest = milliseconds = (end - began) / steps
        for replica in self.replicas if Engine.lacking > 0 else ():
            live, work = len(replica.running), replica._work
            drafted = replica.counts[0] if live else 0
            context = float((work.prompt_tokens + replica._generated)[replica.running if live else slice(None)].mean())

            def cost(rows: int, live=live, drafted=drafted, context=context) -> float:
                return float(self._cost.step_ms(live + rows * (not drafted), live + drafted + rows, context)[0])

            free = range(1, replica._slots - live + 1 if not replica.queue else 1)
            if rows := bisect_right(free, LONGER * milliseconds, key=cost):
                longest, Engine.lacking = max(longest, cost(rows)), Engine.lacking - rows * steps
        self.clock += (longest - milliseconds) * steps
        self.timeline[-1] = (self.clock, steps, *counts)
        return emitted


def play(name: str, scale: int, variant: str, rounds: int) -> list[tuple[float, float, float]]:
    """Seconds, acceptance length, and earlier responses of a prompt, of each round; `variant`: none, ahead or free."""
    cluster, cost, prompts, samples, k, lengths = set_up(name, scale)
    share, found = float(variant == "free"), []  # of the earlier responses' tokens, that are there
    scaled = {"EDGES": workload.EDGES / scale, "PROMPT_TOKENS": max(1, workload.PROMPT_TOKENS // scale)}
    bucket = mock.patch.object(step_cost, "CONTEXT_BUCKET", max(1, step_cost.CONTEXT_BUCKET // scale))
    known = mock.patch.object(step_cost.ExpectedCost, "observe")  # scaled steps are too few to learn costs from
    with bucket, known, mock.patch.multiple(workload, **scaled), mock.patch.object(rollout, "Engine", Engine):
        for number in range(variant != "ahead", rounds + 1):  # what is written in round 0 serves the first
            drawn = workload.log_normal(*lengths, (prompts, samples + MOST), number).lengths.reshape(prompts, -1)
            live, earlier = np.split(drawn, [samples], axis=1)
            written = (earlier * np.clip(MOST * share - np.arange(MOST), 0, 1)).astype(int)
            count = live.size, workload.PROMPT_TOKENS
            work = workload.Round(live.ravel(), np.repeat(range(prompts), samples), np.full(*count), np.zeros(count[0]))
            Engine.lacking = earlier.sum() * (variant == "ahead")
            drafts = lambda work, _, of, *rest: EarlierDrafts(k, written, work.prompts, of, 0, number)  # noqa: B023, E731
            (played,) = rollout.simulate([work], cluster, Choice("goodput", k, scope="shared"), cost, drafts)
            seconds, slots = rollout.seconds(played), cluster.max_num_seqs
            for end in (one["end_ms"][-1] for one in played) if Engine.lacking > 0 else ():  # then with all slots
                Engine.lacking -= slots * (seconds * 1e3 - end) / float(cost.step_ms(slots, slots, lengths[0])[0])
            found += [(seconds * scale, rollout.summarize([played])["accept_length"], MOST * share)] * (number > 0)
            share = min(1.0, 1 - Engine.lacking / earlier.sum()) if variant == "ahead" else share
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.run_ahead")
    parser.add_argument("--setup", nargs="+", default=["qwen3_32b", "qwen3_235b", "qwen3_235b_cautious", *SEER])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=256, help="divides lengths: whole ones take hours")
    parser.add_argument("--measure", type=Path, metavar="RECORDING")
    options = parser.parse_args(arguments)
    if options.measure:
        return print({k: measure(options.measure, k) for k in UPLIFT})
    for name in options.setup:
        plain = play(name, options.scale, "none", options.rounds)
        for variant in ("ahead", "free"):
            found = play(name, options.scale, variant, options.rounds)
            times = [before[0] / after[0] for before, after in zip(plain, found, strict=True)]
            seconds, length, written = map(median, zip(*found, strict=True))
            fast = f"{median(times):.2f} times as fast ({min(times):.2f}-{max(times):.2f}), {seconds:.0f} s"
            before = median(one[1] for one in plain)
            print(f"{name}, {variant}: {fast}; length {before:.2f} to {length:.2f}; {written:.1f} responses")


if __name__ == "__main__":
    main()
