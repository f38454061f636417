"""The real, patched vllm-ascend on a simulated NPU: the same tokens and log-probabilities whatever is drafted.

Scheduled synchronously and asynchronously, eager and in graphs, on one rank and on two.
"""

import itertools
import re

import pytest

from tests.ascend.engines import assert_same, generate_all, of_model
from tests.sam.engine.faults import FAULTS

pytestmark = pytest.mark.engine

STOP = {"stop": [93]}  # a token that four greedy responses hold, one of them within an accepted draft
ABORT = {"abort": True}
SAMPLED = {"temperature": 0.4}
LONG = {"workload": "long"}
SQUEEZED = {"blocks": 10}
WHOLE = SAMPLED | {"responses": 100}
PARTS = WHOLE | {"parts": 5}
SWITCHED = {"threshold": 4}
TWO = {"tensor_parallel": 2}
PATHS = {"paths": 3, "batch": 32}  # free rows beside 14 requests
SYNC, ASYNC = {"method": "sam"}, {"method": "sam async"}
EAGLE3 = {"method": "eagle3", "draft_model": "head"}
MODES = {
    "FULL": {"graph": "FULL"},
    "PIECES": {"graph": "PIECEWISE"},
}
FULL = MODES["FULL"]
PHASES = {"never": {"threshold": 0}, "always": {"threshold": 1000}, "switched": SWITCHED}

# Name: fields of generate.Scenario.
OFF = {
    "off": {},
    "sampled off": SAMPLED,
    "whole off": WHOLE,
    "stop off": STOP,
    "abort off": ABORT,
    "long off": LONG,
    "sampled long off": SAMPLED | LONG,
    "async parts off": PARTS,
    "sync parts off": PARTS | {"async_scheduling": False},
}


def sam(door: str, method: dict) -> dict[str, dict]:
    """What is asked of sam, synchronous and asynchronous."""
    found = {"": {}, "switched": SWITCHED, "sampled": SAMPLED, "stop": STOP, "abort": ABORT, "parts": PARTS}
    found["preempted"] = LONG | SQUEEZED
    return {f"{door} {name}".strip(): method | one for name, one in found.items()}


SYNCHRONOUS = sam("sync", SYNC) | {
    "ngram": {"method": "ngram", "batch": 5},
    "ngram sampled": {"method": "ngram", "batch": 5} | SAMPLED,
    "eagle3": EAGLE3 | {"async_scheduling": False},
    "eagle3 refused": EAGLE3 | {"refused": True},
    "goodput": SYNC | FULL | {"policy": "goodput", "responses": 6},
    "decode only refused": SYNC | {"graph": "FULL_DECODE_ONLY", "refused": True},
}
GRAPHS = {
    f"{mode} {name}": graph | one
    for mode, graph in MODES.items()
    for name, one in {"off": {}, **{phase: ASYNC | chosen for phase, chosen in PHASES.items()}}.items()
}
ASYNCHRONOUS = (
    sam("async", ASYNC)
    | GRAPHS
    | {
        "async rejection": ASYNC | {"verification": "rejection"},
        "async paths preempted": ASYNC | SAMPLED | LONG | SQUEEZED | PATHS,
        "FULL parts": ASYNC | FULL | PARTS,
        "paths FULL": ASYNC | FULL | PATHS,
    }
)
FAULTY = {
    f"{name} {fault}": door | {"fault": fault, "responses": 6}
    for name, door in {"sync": SYNC, "async": ASYNC, "FULL": ASYNC | FULL}.items()
    for fault in (FAULTS if name == "async" else ["drafting_raises"])
}
RANKS = {"sync ranks": SYNC | TWO, "async ranks": ASYNC | FULL | TWO, "paths ranks": ASYNC | TWO | PATHS | SAMPLED}
EXPERTS = {"moe off": {}, "moe FULL": SYNC | FULL}
EXPERT_RANKS = {"moe ranks": SYNC | TWO | {"expert_parallel": True}}
ALL = OFF | SYNCHRONOUS | ASYNCHRONOUS | RANKS | EXPERTS | EXPERT_RANKS
WITH_SAM = [
    name for name, one in ALL.items() if one.get("method", "eagle3") != "eagle3" and one.get("threshold") != 0
    and not any(word in name for word in ("ranks", "goodput", "refused"))
]  # fmt: skip


def reference(name: str) -> str:
    """The scenario without speculation that asks for the same."""
    one = ALL[name]
    if one.get("responses") == WHOLE["responses"]:
        return "whole off"
    kinds = {"moe": "moe" in name, "sampled": "temperature" in one, "long": "workload" in one, "stop": "stop" in one}
    return " ".join([*(kind for kind, is_asked in kinds.items() if is_asked), "off"])


@pytest.fixture(scope="module")
def results(models):
    head = {"draft_model": str(models / "head")}
    synchronous = {name: one | head if "draft_model" in one else one for name, one in SYNCHRONOUS.items()}
    dense = [of_model(models / "dense", part) for part in (ASYNCHRONOUS | FAULTY, OFF | synchronous, RANKS)]
    # vllm-ascend asks once a process whether the model has experts.
    return generate_all(*dense, *(of_model(models / "experts", part) for part in (EXPERTS, EXPERT_RANKS)))


COMPARED = [name for name in ALL if name != reference(name) and "abort" not in name and "refused" not in name]


@pytest.mark.parametrize("name", COMPARED)
def test_the_same_tokens_and_log_probabilities(results, name):
    """Two ranks add their halves up in another order than one rank its whole, parts prompts than what was decoded."""
    assert_same(results, name, reference(name), 1e-4 if "ranks" in name or "parts" in name else 0.0)


@pytest.mark.parametrize("name", WITH_SAM)
def test_drafts_were_made_and_accepted_without_a_fault(results, name):
    result, few = results[name], "switched" in name  # a handful of steps, of whose drafts none need be right
    drafted = sum(step["drafts"] for step in result["steps"])
    assert drafted > (10 if few else 100) and (few or result["accepted"] > 5)
    counters = result["status"]["counters"]
    assert counters.get("draft_errors", 0) == counters.get("path_errors", 0) == 0
    assert ("paths" in name) == (counters.get("path_rows", 0) > 30) == (counters.get("path_wins", 0) > 2)


@pytest.mark.parametrize("name", [*RANKS, *EXPERT_RANKS])
def test_drafts_are_accepted_on_two_ranks(results, name):
    assert results[name]["accepted"] > 5


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_costs_drafts_and_changes_no_token(results, name):
    result = results[name]
    assert_same(results, name, "off")
    assert result["status"]["counters"]["draft_errors"] > 20
    assert len(result["said"]) == 1 and "drafting failed" in result["said"][0]
    if "drafting_raises" in name:
        assert result["accepted"] == 0


def test_what_is_installed_says_so(results):
    status = {name: result["status"] for name, result in results.items() if "refused" not in name}
    drafters = {"sync": "SamProposer", "async": "AscendAsyncSamProposer", "ngram": "AscendNgramProposer"}
    assert {name: status[name]["drafter"] for name in drafters} == drafters
    assert all(status[name]["verification"] == "exact" for name in ("off", *drafters))
    assert status["async rejection"]["verification"] == "rejection"
    for door in ("sync", "async"):
        assert status[door]["asynchronous"] == status[f"{door} parts off"]["asynchronous"] == (door == "async")


def test_vllm_ascends_own_eagle_is_left_as_it_is_and_verified_exactly(results):
    """Not under asynchronous scheduling: vLLM counts all its drafts as accepted until the device has said otherwise."""
    result = results["eagle3"]
    status = result["status"]
    assert status["drafter"] == "AscendEagleProposer" and status["verification"] == "exact"
    assert result["drafted"] > 1000 > result["accepted"] > 5
    assert re.search("verification=exact.*'eagle3'.*async_scheduling=False", results["eagle3 refused"]["refused"])


def test_above_the_threshold_nothing_is_drafted_and_no_token_is_scheduled_in_vain(results):
    """With the switch off a step is plain decode: the engine schedules as many tokens as without speculation."""
    switched, always = results["sync switched"], results["sync"]
    assert switched["status"]["counters"]["skipped_steps"] > 20
    assert 0 < switched["drafted"] < always["drafted"]
    pairs = itertools.pairwise(switched["steps"])
    off = [step for before, step in pairs if before["rows"] > SWITCHED["threshold"] and step["decodes"]]
    assert len(off) > 20 and all(step["drafts"] == 0 and step["tokens"] == step["rows"] for step in off)


def test_a_stop_token_inside_a_draft_ends_a_response_there(results):
    assert results["sync stop"]["reasons"].count("stop") >= 2


@pytest.mark.parametrize("door", ["sync", "async"])
def test_preemption_and_abort(results, door):
    assert results[f"{door} preempted"]["preemptions"] > 0 < results["async paths preempted"]["preemptions"]
    aborted = results[f"{door} abort"]
    off, on = results["abort off"]["tokens"], aborted["tokens"]
    kept = [row for row in range(len(off)) if off[row] is not None and on[row] is not None]
    assert None in on and len(kept) >= 8 and all(off[row] == on[row] for row in kept)
    assert aborted["status"]["followed"] == 0, "requests are still followed although all have ended"


@pytest.mark.parametrize("mode", MODES)
def test_an_asynchronous_step_without_drafts_launches_what_it_launches_without_speculation(results, mode):
    plain, never = results[f"{mode} off"]["steps"], results[f"{mode} never"]["steps"]
    decodes = [(a, b) for a, b in zip(plain, never, strict=True) if a["decodes"]]
    assert len(decodes) > 80
    for one, other in decodes:
        # The scheduler's own count of tokens has room for drafts in it until it has heard that none are wanted.
        assert (one["rows"], one["launched"]) == (other["rows"], other["launched"])


@pytest.mark.parametrize("name", [name for name in GRAPHS if not name.endswith("off")])
def test_nine_asynchronous_steps_of_ten_replay_a_graph(results, name):
    steps = results[name]["steps"]
    replayed = [step for step in steps if any(one.startswith("graph of") for one in step["launched"])]
    assert len(replayed) >= 85 / 94 * len(steps)
    assert sum(replays for replays, _ in results[name]["replays"].values()) == len(replayed)
    assert sum(all_steps for _, all_steps in results[name]["replays"].values()) == len(steps)


def test_step_costs_are_measured_once_graphs_are_captured(results):
    """A pass before that would begin a capture, which vLLM refuses."""
    assert results["goodput"]["status"]["has_step_costs"]


def test_a_graph_mode_without_graphs_for_drafts_is_refused(results):
    assert "cudagraph_mode=FULL_DECODE_ONLY: no graph has drafts" in results["decode only refused"]["refused"]
