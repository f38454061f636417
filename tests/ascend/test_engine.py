"""The real, patched vllm-ascend on a simulated NPU: the same tokens and log-probabilities whatever is drafted."""

import pytest

from tests.ascend.engines import assert_same, generate_all

pytestmark = pytest.mark.engine

STOP = [93]  # a token that four greedy responses hold, one of them within an accepted draft
SAMPLED = {"temperature": 0.4}
SWITCHED = {"method": "sam", "threshold": 4}

# Name: fields of generate.Scenario. Each list runs in a process of its own.
EAGER = {
    "off": {},
    "sam": {"method": "sam"},
    "ngram": {"method": "ngram"},
    "switched": SWITCHED,
    "k15": {"method": "sam", "k": 15},
    "rejection": {"method": "sam", "verification": "rejection"},
    "preempted": {"method": "sam", "workload": "long", "blocks": 10},
    "unpreempted": {"workload": "long"},
    "stop off": {"stop": STOP},
    "stop": {"method": "sam", "stop": STOP},
    "abort off": {"abort": True},
    "abort": {"method": "sam", "abort": True},
}
SAMPLING = {
    "sampled off": SAMPLED,
    "sampled sam": {**SAMPLED, "method": "sam"},
    "sampled ngram": {**SAMPLED, "method": "ngram", "batch": 5},
    "sampled switched": {**SAMPLED, **SWITCHED},
    "sampled preempted": {**SAMPLED, "method": "sam", "workload": "long", "blocks": 10},
    "sampled long off": {**SAMPLED, "workload": "long"},
    "sampled stop off": {**SAMPLED, "stop": STOP},
    "sampled stop": {**SAMPLED, "method": "sam", "stop": STOP},
    "sampled abort off": {**SAMPLED, "abort": True},
    "sampled abort": {**SAMPLED, "method": "sam", "abort": True},
    "DECODE sampled": {"graph": "FULL_DECODE_ONLY", "method": "sam", **SAMPLED},
    "FULL sampled": {"graph": "FULL", "method": "sam", **SAMPLED},
}
TENSOR_PARALLEL = {
    "tp": {"method": "sam", "tensor_parallel": 2},
    "tp sampled": {"method": "sam", "tensor_parallel": 2, **SAMPLED},
}
EXPERTS = {
    "moe off": {},
    "moe": {"method": "sam"},
    "moe FULL": {"method": "sam", "graph": "FULL"},
}
EXPERTS_PARALLEL = {"moe ep": {"method": "sam", "tensor_parallel": 2, "expert_parallel": True}}


@pytest.fixture(scope="module")
def results(models):
    dense, experts = models / "dense", models / "experts"
    jobs = [
        (dense, EAGER), (dense, SAMPLING), (dense, TENSOR_PARALLEL), (experts, EXPERTS), (experts, EXPERTS_PARALLEL)
    ]  # fmt: skip
    return generate_all(jobs)


PAIRS = [
    *((name, "off") for name in ("sam", "ngram", "switched", "k15", "rejection")),
    *((name, "sampled off") for name in ("sampled sam", "sampled ngram", "sampled switched", "FULL sampled")),
    ("DECODE sampled", "sampled off"),
    ("preempted", "unpreempted"),
    ("sampled preempted", "sampled long off"),
    ("sampled stop", "sampled stop off"),
    ("stop", "stop off"),
    ("moe", "moe off"),
    ("moe FULL", "moe off"),
]


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_the_same_tokens_and_log_probabilities(results, name, reference):
    assert_same(results, name, reference)


@pytest.mark.parametrize(("name", "reference"), [("tp", "off"), ("tp sampled", "sampled off"), ("moe ep", "moe off")])
def test_the_same_on_two_ranks(results, name, reference):
    """Two ranks add their halves up in another order than one rank its whole."""
    assert_same(results, name, reference, 1e-4)


@pytest.mark.parametrize(
    "name", [name for part in (EAGER, SAMPLING, TENSOR_PARALLEL, EXPERTS, EXPERTS_PARALLEL) for name in part]
)
def test_drafts_were_made_and_accepted_where_they_should(results, name):
    result = results[name]
    if name.endswith("off") or name == "unpreempted":
        assert result["drafted"] == 0
    else:
        few = "switched" in name  # a handful of steps, of whose drafts none need be right
        assert result["drafted"] > (10 if few else 100) and (few or result["accepted"] > 5)
    if "counters" in result["status"] and "draft_errors" in result["status"]["counters"]:
        assert result["status"]["counters"]["draft_errors"] == 0


def test_what_is_installed_says_so(results):
    assert results["off"]["status"]["verification"] == "exact"
    assert results["sam"]["status"]["drafter"] == "SamProposer"
    assert results["ngram"]["status"]["drafter"] == "AscendNgramProposer"
    assert results["rejection"]["status"]["verification"] == "rejection"
    assert results["rejection"]["status"]["sampled_steps"] > 10


def test_above_the_threshold_nothing_is_drafted_and_no_token_is_scheduled_in_vain(results):
    """With the switch off a step is plain decode: the engine schedules as many tokens as without speculation."""
    switched, sam = results["switched"], results["sam"]
    assert switched["status"]["counters"]["skipped_steps"] > 20
    assert 0 < switched["drafted"] < sam["drafted"]
    assert switched["drafted_while_off"] == 0
    assert switched["scheduled_while_off"] == switched["rows_while_off"] > 100


def test_a_stop_token_or_the_maximum_length_inside_a_draft_ends_a_response_there(results):
    """Accepted drafts beyond it were sampled and cut off."""
    assert results["stop"]["reasons"].count("stop") >= 2
    for name in ("stop", "sam"):
        kept = sum(len(tokens) for tokens in results[name]["tokens"])
        assert results[name]["emitted"] > kept


@pytest.mark.parametrize("kind", ["", "sampled "])
def test_preemption_and_abort(results, kind):
    assert results[f"{kind}preempted"]["preemptions"] > 0
    off, on = results[f"{kind}abort off"]["tokens"], results[f"{kind}abort"]["tokens"]
    kept = [row for row in range(len(off)) if off[row] is not None and on[row] is not None]
    assert None in on and len(kept) >= 8
    assert all(off[row] == on[row] for row in kept)
    assert results[f"{kind}abort"]["followed"] == 0, "requests are still followed although all have ended"
