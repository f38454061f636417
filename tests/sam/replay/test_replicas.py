"""Replicas and epochs: whose tokens a drafter has seen, and when."""

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest

from sam.record.responses import Recording, join, read_recording
from sam.replay.__main__ import main
from sam.replay.baselines import make_drafter
from sam.replay.round_robin import replay
from sam.replay.stepwise import StepwiseDrafter
from sam.sharing.drafter import SharingDrafter

K = 3


class Watcher(StepwiseDrafter):
    """Drafts nothing, and notes how much of every request it knows when it is asked to."""

    def __init__(self):
        super().__init__()
        self.known, self.finished, self.versions = [], {}, []

    def start(self, request_id, prompt, policy_version=0):
        super().start(request_id, prompt)
        self.versions.append(policy_version)

    def propose(self, request_id, text, budget):
        self.known.append({name: used - 1 for name, (_, used) in self._texts.items()})
        return text[:0]

    def finish(self, request_id):
        self.finished[request_id] = self._texts[request_id][1] - 1
        super().finish(request_id)


def watch(responses, **how):
    """A watcher for each replica, after a replay of responses of these lengths to a prompt of one token."""
    watchers = []

    def make():
        watchers.append(Watcher())
        return watchers[-1]

    samples = [np.arange(length, dtype=np.int32) for length in responses]
    replay(Recording([np.array([9], np.int32)], [samples]), make, K, **how)
    return watchers


@pytest.fixture
def related():
    """Samples that repeat pieces of one text, each in an order of its own."""
    rng = np.random.default_rng(0)
    pieces = rng.integers(0, 500, (20, 15))
    samples = [pieces[rng.permutation(20)].ravel().astype(np.int32) for _ in range(6)]
    return Recording([np.array([1, 2], np.int32)], [samples])


def test_samples_go_round_robin_and_without_sharing_stay_alone():
    first, second = watch([4, 4, 4], replicas=2)
    assert first.finished == {"0/0/0": 4, "0/0/2": 4}
    assert second.finished == {"0/0/1": 4}


@pytest.mark.parametrize("order", ["turns", "engine"])
@pytest.mark.parametrize("delay", [0, 3])
def test_tokens_of_siblings_elsewhere_arrive_late_by_the_delay(order, delay):
    first, second = watch([8, 8], replicas=2, delay=delay, order=order)
    later = 1 if order == "turns" else 0  # taking turns, the second replica has the first one's new token already
    assert [known["0/0/1"] for known in first.known] == [max(0, done - delay) for done in range(8)]
    assert [known["0/0/0"] for known in second.known] == [max(0, done + later - delay) for done in range(8)]
    assert first.finished == second.finished == {"0/0/0": 8, "0/0/1": 8}


def test_the_end_of_a_finished_sibling_arrives_a_token_a_round():
    first, _ = watch([10, 2], replicas=2, delay=4)
    assert [known["0/0/1"] for known in first.known] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]


def test_replicas_that_share_without_delay_are_as_one(related):
    make = partial(make_drafter, "sam", "group", K)
    one = replay(related, make, K).summary()
    shared = replay(related, make, K, replicas=3, delay=0).summary()
    alone = replay(related, make, K, replicas=3).summary()
    late = replay(related, make, K, replicas=3, delay=100).summary()
    lengths = [summary["mean_acceptance_length"] for summary in (alone, late, shared)]
    assert shared["steps"] == one["steps"] and lengths[0] < lengths[1] < lengths[2]
    assert {summary["tokens"] for summary in (one, shared, alone, late)} == {related.num_tokens}


@pytest.mark.parametrize("delay", [0, 30])
def test_text_arrives_on_the_way_that_an_engines_takes(related, delay, monkeypatch):
    """All that siblings generate goes through the function that appends what a client has received."""
    arrived, append = Counter(), SharingDrafter.append_arrived

    def counted(drafter, part):
        arrived[drafter] += append(drafter, part)

    monkeypatch.setattr(SharingDrafter, "append_arrived", counted)
    made = []

    def make():
        made.append(make_drafter("sam", "group", K))
        return made[-1]

    replay(related, make, K, replicas=3, delay=delay)
    # Four of the six samples are elsewhere; text that has not arrived when the last sample ends comes then.
    assert [arrived[drafter] for drafter in made] == [related.num_tokens * 4 // 6] * 3


def test_epochs_go_one_after_the_other_and_the_first_is_not_counted():
    text = np.random.default_rng(0).integers(0, 1000, 100).astype(np.int32)
    recording = Recording([np.array([9], np.int32)], [[text, text[:60], text]], [[2, 1, 1]])
    assert [[len(sample) for sample in part.responses[0]] for part in recording.by_epoch()] == [[60, 100], [100]]
    kept = replay(recording, partial(make_drafter, "sam", "history", K), K, epochs="kept")
    forgotten = replay(recording, partial(make_drafter, "sam", "history", K), K, epochs="forgotten")
    assert kept.tokens == forgotten.tokens == 100
    assert kept.steps < 35 and forgotten.steps > 90
    watcher = Watcher()
    replay(recording, lambda: watcher, K, epochs="kept")
    assert watcher.versions == [0, 0, 1]


def test_a_recording_of_one_epoch_is_refused(tmp_path, capsys):
    arrays = {
        "prompt_tokens": [1], "prompt_offsets": [0, 1],
        "response_tokens": [5, 6, 5], "response_offsets": [0, 2, 3], "response_prompt": [0, 0],
    }  # fmt: skip
    files = {}
    for name, epochs in {"none": None, "same": [3, 3], "two": [0, 1]}.items():
        files[name] = tmp_path / f"{name}.npz"
        np.savez(files[name], **arrays, **({"response_epoch": epochs} if epochs else {}))
    for name in ("none", "same"):
        assert main(["--traces", str(files[name]), "--no-cost", "--epochs"]) == 2
        assert "expected two or more in response_epoch" in capsys.readouterr().err.splitlines()[-1]
    assert main(["--traces", str(files["two"]), "--no-cost", "--epochs", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["tokens"], row["epochs"], row["replicas"], row["delay"]) == (1, "forgotten", 1, None)
    two, none = (read_recording(files[name]) for name in ("two", "none"))
    assert join([two, two]).epochs == [[0, 1], [0, 1]] and join([two, none]).epochs is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "--replicas 0: expected 1 or more"),
        (["--replicas", "2", "--samples", "2"], "--samples and --replicas: expected one of them"),
        (["--sharing"], "--sharing: expected --replicas 2 or more"),
        (["--replicas", "2", "--delay", "5"], "--delay 5: expected 0 or more, and --sharing"),
        (["--replicas", "2", "--sharing", "--delay", "-1"], "--delay -1: expected 0 or more, and --sharing"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(flags, message, capsys):
    with pytest.raises(SystemExit):
        main(["--traces", "any.npz", *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]
