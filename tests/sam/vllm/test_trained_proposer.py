"""What a draft model beside sam is asked in each step, with a model runner and passes that are made up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.switch.draft_passes import PassCost
from sam.vllm.proposer import SamProposer
from sam.vllm.trained.no_text import NoText
from tests.sam.vllm.model_runner import LENGTH, Runner

trained = pytest.importorskip("sam.vllm.trained.proposer")


class MadeUpPasses:
    """Drafts 7s, which are right; `asked` is what each step needs."""

    written = None

    def missing(self, ids, rows, lengths, texts):
        self.asked.append("missing")
        return np.ones_like(lengths)

    def draft(self, ids, rows, lengths, missing, texts, count):
        self.asked.append("draft")
        return torch.full((len(ids), count), 7), torch.ones((len(ids), count), dtype=torch.bool), None

    def _vocabulary(self):
        return 100


class MadeUp(MadeUpPasses, trained.SwitchedDraftModel):
    """Beside a source that never knows anything."""

    def __init__(self, **settings):
        speculation = {"method": "hybrid", "draft_model": "a model", "policy": "goodput", **settings}
        config = SimpleNamespace(
            additional_config={"speculation": speculation},
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            model_config=SimpleNamespace(max_model_len=LENGTH, model="a model"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, distributed_executor_backend="uni"),
        )
        SamProposer.__init__(self, config)
        self.draft_model_config = SimpleNamespace(max_model_len=LENGTH)
        self._begin(trained.SpeculationConfig.from_vllm(config))
        self.pass_cost = PassCost(np.array([1, 101]), np.array([0.01, 0.02]))
        self.pass_cost.observe = self.policy.observe = lambda *_unused: None  # no clock
        self.asked = []
        self.bind(Runner(config))
        expected = self.acceptance.expected

        def counted(ids):
            self.asked.append("expected")
            return expected(ids)

        self.acceptance.expected = counted

    def _make_drafter(self, config):
        return NoText()

    def propose(self, *given):
        return SamProposer.propose(self, *given)


@pytest.fixture
def proposer():
    made = MadeUp()
    made._runner.add("a", [1, 2, 3])
    return made


def steps(proposer, verdicts):
    """What each step asked for, where a trial's verdict allows passes or not."""
    trials, found = proposer.pass_cost.trials, []
    trials.are_needed = True
    for allowed in verdicts:
        trials.step = lambda *_unused, allowed=allowed: allowed
        proposer.last.valid_for_steps = proposer.policy._pause.steps = 0
        proposer.asked.clear()
        proposer._runner.step(proposer, ["a"], {"a": [7]})
        found.append(list(proposer.asked))
    assert proposer.counters["draft_errors"] == proposer.counters["draft_model_errors"] == 0
    return found


def test_a_step_of_a_rest_asks_for_nothing(proposer):
    found = steps(proposer, [True] * 2 + [False] * 5 + [True])
    assert found[2:7] == [[]] * 5
    assert found[1] == found[7] == ["expected", "missing", "draft"]
    assert proposer.counters["draft_model_rests"] == 5 and proposer.counters["draft_model_steps"] == 3


def test_what_was_missed_is_not_looked_up_where_passes_would_not_pay_anyway(proposer):
    proposer.acceptance._all[0] = 1e6  # observed, none of it accepted
    assert steps(proposer, [True] * 3) == [["expected"]] * 3
    assert proposer.counters["draft_model_rests"] == 3


def test_hashes_of_texts_are_forgotten_after_a_rest_as_names_may_come_again(proposer):
    kept = []
    proposer.written = SimpleNamespace(keep_only=lambda names: kept.append(list(names)))
    steps(proposer, [True, True])
    assert kept == [["a"]]  # what the first step drafted was compared in the second
    steps(proposer, [False, False])
    steps(proposer, [True])
    assert kept[-1] == []


def test_the_published_rule_is_not_held_against_trials():
    proposer = MadeUp(min_match_len=4)
    proposer._runner.add("a", [1, 2, 3])
    assert all("draft" in asked for asked in steps(proposer, [False] * 3))
