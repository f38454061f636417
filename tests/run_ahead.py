"""`python -m tests.run_ahead`: what text written ahead would bring to a rollout, by simulation; nothing of it is built.

In slots that stand free the next step's prompts would be decoded, to draft from. A step takes as many such rows as make
it at most 2 % longer; a row costs a request or, beside drafts, a draft token. `free`: eight of each prompt for nothing.
"""

import argparse
from bisect import bisect_right
from unittest import mock

import numpy as np

from sam.reading import json_object
from sam.switch import step_cost
from sam.tools.simulate import rollout, workload

REQUESTS = 1, 2, 4, 8, 16, 32, 64, 256, 1024
MOST, LONGER = 8, 1.02  # responses of a prompt from the step before; of a step's time
# Of a record's rank, so that beside 0, 1, 2, 4, 8 earlier responses as many are accepted as measured; by draft tokens.
POWERS = {3: (0, 0.1132, 0.17853, 0.2652, 0.3885), 8: (0, 0.1297, 0.2213, 0.333, 0.49103)}
# An eighth of Seer's (arXiv 2511.14617): cards of one, replicas, prompts, samples, cap and mean tokens; bytes of
# weights, active parameters, share of the experts in a token, bytes of a token's KV cache.
SEER = {
    "Moonlight": (1, 4, 50, 8, 65536, 22386, 32e9, 3e9, 6 / 64, 31104),
    "Qwen2-VL-72B": (8, 2, 75, 16, 40960, 7615, 146e9, 72e9, 1.0, 327680),
    "Kimi-K2": (32, 1, 100, 8, 98304, 38959, 1.03e12, 32e9, 8 / 384, 70272),
}


class EarlierDrafts(workload.DrawnDrafts):
    """Drawn beside earlier responses of `written` tokens (int64 [prompts, 8]), each a share of a request's own text."""

    def __init__(self, k: int, written: np.ndarray, prompts: np.ndarray, seed: int):
        super().__init__(table := workload.shipped_acceptance(k), prompts, seed)
        order = np.argsort(table.acceptance.sum(axis=-1), axis=-1, kind="stable")[..., None]
        shares = (np.argsort(order, axis=2) + 0.5) / (count := order.shape[2])
        places = (count * shares ** (1 / (1 + np.array(POWERS[k])))).astype(int)
        self.written, self.likelier = written, np.take_along_axis(order, places, axis=2)  # of its cell, by power

    def draft(self, requests, generated, budgets, min_acceptance):
        super().draft(requests, generated, budgets, min_acceptance)
        shares = np.minimum(1.0, self.written[self._prompts[requests]] / np.maximum(1, generated)[:, None])
        levels = np.searchsorted((0.5, 2**0.5, 8**0.5, 32**0.5), shares.sum(axis=1), side="right")
        return self._drawn((*self._records[:2], self.likelier[*self._records, levels]), budgets, min_acceptance)


class Engine(rollout.Engine):
    """Writes ahead in free slots as long as `lacking` tokens, set for all engines before a round, is above 0."""

    def advance(self, may_jump):
        began, emitted, (end, steps, *counts) = self.clock, super().advance(may_jump), self.timeline[-1]
        longest = milliseconds = (end - began) / steps
        for replica in self.replicas if Engine.lacking > 0 else ():
            free = range(1, 1 if replica.queue else replica._slots - len(replica.running) + 1)
            if rows := bisect_right(free, LONGER * milliseconds, key=lambda rows: self.cost(replica, rows)):  # noqa: B023
                longest, Engine.lacking = max(longest, self.cost(replica, rows)), Engine.lacking - rows * steps
        self.clock += (longest - milliseconds) * steps
        self.timeline[-1] = (self.clock, steps, *counts)
        return emitted

    def cost(self, replica, rows: int) -> float:
        """Milliseconds of a replica's last step with so many rows beside it."""
        drafted = replica.counts[0] if (live := len(replica.running)) else 0
        tokens = (replica._work.prompt_tokens + replica._generated)[replica.running if live else slice(None)]
        return float(self._cost.step_ms(live + rows * (not drafted), live + drafted + rows, float(tokens.mean()))[0])


def play(name: str, variant: str, options) -> np.ndarray:
    """float64 [rounds, 3]: seconds, acceptance length, earlier responses of each; `variant`: none, ahead or free."""
    scale, samples, k = options.scale, rollout.SAMPLES, 8
    if name in SEER:
        cards, replicas, prompts, samples, cap, mean, weights, active, experts, kv = SEER[name]
        lengths, axes = (mean / scale, cap // scale, 0.8, 0.75), (np.array(REQUESTS), np.arange(1, 10))
        requests, tokens, context = np.meshgrid(*axes, contexts := np.array([1, cap // scale]), indexing="ij")
        read = weights * (1 - (1 - experts) ** (requests * tokens)) + kv * scale * requests * context
        cells = 5.0 + (read / 1.675e9 + 2 * active * requests * tokens / 0.495e12) / cards  # at half an H100's peak
        cluster = rollout.Cluster(replicas, int((0.9 * 80e9 * cards - weights) / kv / mean))
    else:
        setup, about = map(json_object(path := rollout.SHIPPED / f"{name}.json").get, ("setup", "about"))
        cluster, prompts, k = rollout.Cluster(**setup["cluster"]), setup["prompts"], setup["k"]
        cost, mean = step_cost.StepCost.load(path), about["mean_response_tokens"]
        contexts, spread = np.maximum(1, cost.context // scale), (rollout.SIGMA, rollout.CORRELATION)
        lengths = mean / scale, rollout.CAP // scale, *spread
        axes = cost.requests, cost.tokens_per_request
    cost = step_cost.StepCost(*axes, contexts, cells if name in SEER else cost.milliseconds)
    share, found, slots, shape = float(variant == "free"), [], cluster.max_num_seqs, (prompts, samples + MOST)
    scaled = {"EDGES": workload.EDGES / scale, "PROMPT_TOKENS": max(1, workload.PROMPT_TOKENS // scale)}
    bucket = mock.patch.object(step_cost, "CONTEXT_BUCKET", max(1, step_cost.CONTEXT_BUCKET // scale))
    known = mock.patch.object(step_cost.ExpectedCost, "observe")  # scaled steps are too few to learn costs from
    with bucket, known, mock.patch.multiple(workload, **scaled), mock.patch.object(rollout, "Engine", Engine):
        for number in range(variant != "ahead", options.rounds + 1):  # what is written in round 0 serves the first
            live, earlier = np.split(workload.log_normal(*lengths, shape, number).lengths.reshape(shape), [samples], 1)
            written = (earlier * np.clip(MOST * share - np.arange(MOST), 0, 1)).astype(int)
            read, Engine.lacking = np.full(live.size, workload.PROMPT_TOKENS), earlier.sum() * (variant == "ahead")
            work = workload.Round(live.ravel(), np.repeat(range(prompts), samples), read, np.zeros(live.size))
            drafts = lambda work, *_: EarlierDrafts(k, written, work.prompts, number)  # noqa: B023, E731
            (played,) = rollout.simulate([work], cluster, rollout.Choice("goodput", k, scope="shared"), cost, drafts)
            seconds = rollout.seconds(played)
            for end in (one["end_ms"][-1] for one in played) if Engine.lacking > 0 else ():  # then with all slots
                Engine.lacking -= slots * (seconds * 1e3 - end) / float(cost.step_ms(slots, slots, lengths[0])[0])
            found += [(seconds * scale, rollout.summarize([played])["accept_length"], MOST * share)] * (number > 0)
            share = min(1.0, 1 - Engine.lacking / earlier.sum()) if variant == "ahead" else share
    return np.array(found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.run_ahead")
    parser.add_argument("--setup", nargs="+", default=["qwen3_32b", "qwen3_235b", "qwen3_235b_cautious", *SEER])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=256, help="divides lengths: whole ones take hours")
    options = parser.parse_args(arguments)
    for name in options.setup:
        plain = play(name, "none", options)
        for variant in ("ahead", "free"):
            times = plain[:, 0] / (found := play(name, variant, options))[:, 0]
            (_, before, _), (seconds, length, written) = np.median(plain, axis=0), np.median(found, axis=0)
            fast = f"{np.median(times):.2f} times as fast ({min(times):.2f}-{max(times):.2f}), {seconds:.0f} s"
            print(f"{name}, {variant}: {fast}; length {before:.2f} to {length:.2f}; {written:.1f} responses")


if __name__ == "__main__":
    main()
