"""The real, patched vllm-ascend on a simulated NPU: the same tokens and log-probabilities whatever is drafted.

Scheduled synchronously and asynchronously, eager and in graphs; test_ranks.py has two ranks and experts.
"""

import itertools
from types import SimpleNamespace

import pytest

from sam.switch.policies import make_policy
from sam.vllm.plugin import installed
from sam.vllm.step_recorder import StepRecorder
from tests.ascend.engines import ROWS, engine
from tests.ascend.simulator import launches
from tests.sam.engine import matrix
from tests.sam.engine.faults import FAULTS, mend
from tests.sam.engine.test_exact_sampler import ask, mixed
from tests.sam.engine.tiny_engine import PROMPTS, SETTINGS, assert_same
from tests.sam.engine.trained_models import fit_output_layer, save_head

pytestmark = pytest.mark.engine

K, THRESHOLD = 3, 4
# Whether an engine is scheduled asynchronously, and its cudagraph_mode.
DOORS = {"sync": (False, None), "async": (True, None), "FULL": (True, "FULL"), "PIECEWISE": (True, "PIECEWISE")}
SHORT = [prompt[:6] for prompt in PROMPTS]  # one step takes them all
LONG = [prompt * 6 for prompt in PROMPTS[1:]]  # of 108 tokens: responses need a second block, of which there are few
CUTS = {row: cuts for row, cuts in matrix.cuts().items() if row in ROWS}


def status(drafter: str | None, verification: str = "exact", asynchronous: bool = False) -> dict:
    return {"drafter": drafter, "verification": verification, "asynchronous": asynchronous}


def assert_without_errors(engine) -> None:
    assert not any(value for counter, value in engine.counters().items() if counter.endswith("_errors"))


@pytest.fixture(scope="module")
def off(model):
    """What engines without speculation answer and launch, by door. All have ended before another starts."""
    found = {}
    for name, (asynchronous, graph) in DOORS.items():
        with engine(model, None, asynchronous, graph) as own:
            steps = launches.attach(own.runner)
            one = found[name] = SimpleNamespace(short=own.generate(SHORT), steps=list(steps))
            if graph is None:
                one.matrix, one.cut = matrix.run(own, ROWS), matrix.run(own, CUTS, CUTS)
                one.long = own.generate(LONG, SETTINGS[1:])
    return found


def test_without_speculation_it_is_the_same_however_it_is_scheduled_or_cut(off):
    sync = off["sync"]
    for one in off.values():
        assert_same(one.short, sync.short)
    matrix.assert_same(off["async"].matrix, sync.matrix, ROWS)
    for one in (sync, off["async"]):
        matrix.assert_same(one.cut, sync.matrix, CUTS, by=1e-4)  # parts compute as prompts what was decoded
        assert one.long.preemptions > 0


def test_every_constraint_goes_with_drafts(model):
    found = []
    for method in (None, "sam"):
        with engine(model, method, num_gpu_blocks_override=128) as own:
            found.append(ask(own, mixed))
    assert_same(*found)
    assert found[1].accepted > 50


def test_further_paths_are_verified_as_rows_of_the_batch(model, off):
    with engine(model, "sam", True, "FULL", speculation={"paths": 3}) as own:
        matrix.assert_same(matrix.run(own, ROWS), off["sync"].matrix, ROWS)
        long = own.generate(LONG, SETTINGS[1:])
        assert_same(long, off["sync"].long)
        assert long.preemptions > 0 and own.counters()["path_rows"] > 30 and own.counters()["path_wins"] > 2
        assert_without_errors(own)


def test_vllm_ascends_own_ngram_is_verified_exactly(model, off):
    with engine(model, "ngram") as own:
        assert installed(own.runner) == status("AscendNgramProposer")
        matrix.assert_same(matrix.run(own, ROWS), off["sync"].matrix, ROWS)
        assert own.count()["accepted"] > 10


def test_vllm_ascends_own_eagle_is_left_as_it_is_and_verified_exactly(model, off, tmp_path):
    """Not under asynchronous scheduling: vLLM counts all its drafts as accepted until the device has said otherwise."""
    save_head(model, tmp_path)
    answers = off["sync"].short
    fit_output_layer(model, tmp_path, [prompt + list(one) for prompt, one in zip(SHORT, answers.tokens, strict=True)])
    drafter = {"speculative_config": {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": K}}
    with engine(model, **drafter) as own:
        assert installed(own.runner) == status("AscendEagleProposer")
        found = own.generate(SHORT)
    assert_same(found, answers)
    assert found.drafted > 1000 > found.accepted > 5
    with pytest.raises(ValueError, match="verification=exact.*'eagle3'.*async_scheduling=False"):
        engine(model, None, True, **drafter)


def test_rejection_sampling_gives_the_same_greedy_tokens(model, off):
    with engine(model, "sam", True, speculation={"verification": "rejection"}) as own:
        found = own.generate(SHORT[::3], SETTINGS[::3])
        assert found.tokens == off["sync"].short.tokens[::3] and found.accepted > 5
        assert installed(own.runner) == status("AscendAsyncSamProposer", "rejection", asynchronous=True)
        assert_without_errors(own)


def test_goodput_measures_step_costs_once_graphs_are_captured(model, off):
    """A pass before that would begin a capture, which vLLM refuses."""
    with engine(model, "sam", False, "FULL", speculation={"policy": "goodput"}) as own:
        assert own.runner.drafter.policy.has_table
        assert_same(own.generate(SHORT), off["sync"].short)


def test_a_graph_mode_without_graphs_for_drafts_is_refused(model):
    with pytest.raises(RuntimeError, match="cudagraph_mode=FULL_DECODE_ONLY: no graph has drafts"):
        engine(model, "sam", False, "FULL_DECODE_ONLY")


@pytest.fixture(scope="module", params=DOORS)
def door(request, model, off):
    """An engine that drafts, by the way it is scheduled and computed."""
    own_door = DOORS[request.param]
    with engine(model, "sam", *own_door) as own:
        own.name, (own.is_async, own.graph), own.installed = request.param, own_door, installed(own.runner)
        own.recorder, own.steps = StepRecorder.attach(own.runner), launches.attach(own.runner)
        yield own


def test_requests_of_every_kind_whole_and_cut(door, off):
    drafter = "AscendAsyncSamProposer" if door.is_async else "SamProposer"
    assert door.installed == status(drafter, asynchronous=door.is_async)
    matrix.assert_same(matrix.run(door, ROWS), off["sync"].matrix, ROWS)
    found = door.count()
    assert found["preemptions"] > 10 and found["accepted"] > 50
    matrix.assert_same(matrix.run(door, CUTS, CUTS), off["sync"].matrix, CUTS, by=1e-4)
    long = door.generate(LONG, SETTINGS[1:])
    assert_same(long, off["sync"].long)
    assert long.preemptions > 0 and long.accepted > 50
    matrix.run(door, [0])  # requests that have ended are released by the next step
    assert len(door.runner.drafter.session.texts) <= 1
    assert_without_errors(door)


@pytest.fixture
def run(door, off, monkeypatch):
    """A function of a policy: what comes out with it, the tokens of no speculation, and the steps. With graphs nine of
    ten steps replay one, and recorded is how many do."""

    def run_with(policy: str) -> tuple[SimpleNamespace, list[dict]]:
        monkeypatch.setattr(door.runner.drafter.session.switch, "policy", make_policy(policy, K, THRESHOLD))
        door.steps.clear()
        door.recorder.take()
        found = door.generate(SHORT)
        assert_same(found, off["sync"].short)
        if door.graph:
            replayed = [step for step in door.steps if any(one.startswith("graph of") for one in step["launched"])]
            assert len(replayed) >= 0.9 * len(door.steps)
            assert sum(replays for replays, _ in door.recorder.take().replays().values()) == len(replayed)
        return found, door.steps

    return run_with


def test_drafts_are_made_and_accepted(run):
    found, _ = run("always")
    assert found.drafted > 100 and found.accepted > 50


def test_above_the_threshold_nothing_is_drafted_and_no_token_is_scheduled_in_vain(door, run):
    """With the switch off a step is plain decode."""
    found, steps = run("threshold")
    assert found.counters["skipped_steps"] > 20 and found.accepted > 0
    pairs = itertools.pairwise(steps)
    plain = [step for before, step in pairs if before["rows"] > THRESHOLD and step["decodes"]]
    assert len(plain) > 20
    # Under asynchronous scheduling tokens have room for drafts until the scheduler has heard that none are wanted.
    assert door.is_async or all(step["drafts"] == 0 and step["tokens"] == step["rows"] for step in plain)


def test_steps_without_drafts_launch_nothing_that_they_do_not_launch_without_speculation(door, off, run):
    _, steps = run("never")
    decodes = [(a, b) for a, b in zip(off[door.name].steps, steps, strict=True) if a["decodes"]]
    assert len(decodes) > 80
    # The scheduler's own count of tokens has room for drafts in it until it has heard that none are wanted.
    assert [a["rows"] for a, _ in decodes] == [b["rows"] for _, b in decodes]
    assert not [more for a, b in decodes if (more := b["launched"] - a["launched"])]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_drafts_and_changes_no_token(door, off, fault, monkeypatch):
    said, drafter = [], door.runner.drafter
    monkeypatch.setattr("sam.engine.session.logger.exception", lambda text, *_: said.append(text))
    monkeypatch.setitem(drafter.counters, "draft_errors", 0)
    FAULTS[fault](drafter)
    found = door.generate(SHORT[:6], SETTINGS[:6])
    mend(drafter)
    assert found.tokens == off["sync"].short.tokens[:6]
    assert found.counters["draft_errors"] > 20 and (found.accepted == 0 or fault != "drafting_raises")
    assert len(said) == 1 and "drafting failed" in said[0]
