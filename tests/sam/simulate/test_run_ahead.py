"""What `python -m tests.run_ahead` prints of text written ahead, on rollouts of few tokens."""

import numpy as np
import pytest

from sam.simulate import rollout, workload
from sam.switch import step_cost
from tests import run_ahead

NAME, SCALE = "qwen3_32b", 1024


def test_it_prints_a_line_of_each_variant(capsys):
    run_ahead.main(["--setup", NAME, "--rounds", "1", "--scale", str(SCALE)])
    ahead, free = capsys.readouterr().out.splitlines()
    assert ahead.startswith(f"{NAME}, ahead: ") and free.startswith(f"{NAME}, free: ")
    assert free.endswith("8.0 responses")


def test_a_round_without_earlier_text_is_the_simulators(monkeypatch):
    ((seconds, length, written),) = run_ahead.play(NAME, SCALE, "none", 1)
    monkeypatch.setattr(workload, "EDGES", workload.EDGES / SCALE)
    monkeypatch.setattr(workload, "PROMPT_TOKENS", 1)
    monkeypatch.setattr(step_cost, "CONTEXT_BUCKET", 1)
    monkeypatch.setattr(step_cost.ExpectedCost, "observe", lambda *step, **how: None)
    cluster, cost, prompts, samples, k, lengths = run_ahead.set_up(NAME, SCALE)
    drawn = workload.log_normal(*lengths, (prompts, samples + run_ahead.MOST), 1)
    live = np.arange(len(drawn)) % (samples + run_ahead.MOST) < samples
    columns = drawn.lengths, drawn.prompts, drawn.prompt_tokens, drawn.arrivals
    work = workload.Round(*(column[live] for column in columns))
    table, choice = workload.shipped_acceptance(k), rollout.Choice("goodput", k, scope="shared")

    def drafts(work, _, replica_of, *rest):
        return workload.DrawnDrafts(table, work.prompts, replica_of, 0, 1)

    played = rollout.simulate([work], cluster, choice, cost, drafts)
    assert (seconds, length) == (rollout.seconds(played[0]) * SCALE, rollout.summarize(played)["accept_length"])
    assert written == 0


@pytest.mark.parametrize("k", run_ahead.UPLIFT)
def test_more_earlier_text_is_accepted_as_measured(k):
    accepted = workload.shipped_acceptance(k).accepted
    for times in run_ahead.UPLIFT[k]:
        assert accepted[run_ahead.likelier(k, times)].mean() == pytest.approx(times * accepted.mean(), rel=0.01)
