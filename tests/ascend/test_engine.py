"""The real, patched vllm-ascend on a simulated NPU: the same tokens and log-probabilities whatever is drafted."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.engine

GENERATE = Path(__file__).with_name("generate.py")
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
    "FULL off": {"graph": "FULL"},
    "FULL": {"graph": "FULL", "method": "sam"},
    "FULL sampled": {"graph": "FULL", "method": "sam", **SAMPLED},
    "FULL switched": {"graph": "FULL", **SWITCHED},
    "DECODE off": {"graph": "FULL_DECODE_ONLY"},
    "DECODE": {"graph": "FULL_DECODE_ONLY", "method": "sam"},
    "DECODE switched": {"graph": "FULL_DECODE_ONLY", **SWITCHED},
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
def models(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "initializer_range": 0.25,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(**common)).float().save_pretrained(folder / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts)).float().save_pretrained(folder / "experts")
    return folder


def generate(model, scenarios) -> dict[str, dict]:
    finished = subprocess.run(
        [sys.executable, str(GENERATE), str(model)],
        input=json.dumps(list(scenarios.values())),
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(GENERATE.parent)},
    )
    lines = [line.removeprefix("RESULT ") for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(scenarios), finished.stderr[-6000:]
    return dict(zip(scenarios, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def results(models):
    dense, experts = models / "dense", models / "experts"
    jobs = [
        (dense, EAGER), (dense, SAMPLING), (dense, TENSOR_PARALLEL), (experts, EXPERTS), (experts, EXPERTS_PARALLEL)
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        return {name: one for part in pool.map(lambda job: generate(*job), jobs) for name, one in part.items()}


def assert_same(results, name, reference, log_probabilities=0.0):
    one, other = results[name], results[reference]
    assert one["tokens"] == other["tokens"]
    assert one["reasons"] == other["reasons"]
    for a, b in zip(one["logprobs"], other["logprobs"], strict=True):
        assert a is b is None or max(abs(x - y) for x, y in zip(a, b, strict=True)) <= log_probabilities


PAIRS = [
    *((name, "off") for name in ("sam", "ngram", "switched", "k15", "rejection")),
    *((name, "off") for name in ("FULL off", "FULL", "FULL switched", "DECODE off", "DECODE", "DECODE switched")),
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
        few = "switched" in name
        assert result["drafted"] > (20 if few else 100) and result["accepted"] > (0 if few else 5)
    if "counters" in result["status"] and "draft_errors" in result["status"]["counters"]:
        assert result["status"]["counters"]["draft_errors"] == 0


def test_what_is_installed_says_so(results):
    assert results["off"]["status"]["verification"] == "exact"
    assert results["sam"]["status"]["drafter"] == "SamProposer"
    assert results["ngram"]["status"]["drafter"] == "AscendNgramProposer"
    assert results["rejection"]["status"]["verification"] == "rejection"
    assert results["rejection"]["status"]["sampled_steps"] > 10
    for name in ("off", "sam", "rejection"):
        assert results[name]["status"]["invalid_rows"] == 0


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


def test_graphs_replay_and_full_decode_only_falls_back_to_eager(results, capsys):
    """The figures behind the recommendation cudagraph_mode=FULL in docs/ascend.md."""
    with capsys.disabled():
        for name in ("FULL off", "FULL", "FULL switched", "DECODE off", "DECODE", "DECODE switched"):
            modes, replays = results[name]["modes"], results[name]["graph"]["replays"]
            print(f"\n{name}: {replays} replays in {sum(modes.values())} steps, {modes.get('NONE', 0)} eager", end="")
    for name in ("FULL off", "FULL", "FULL switched", "DECODE off"):
        assert results[name]["graph"]["replays"] == results[name]["modes"]["FULL"]
        assert results[name]["modes"]["FULL"] > 0.85 * sum(results[name]["modes"].values())
    for name in ("DECODE", "DECODE switched"):
        assert results[name]["graph"]["replays"] == results[name]["modes"].get("FULL", 0)
        assert results[name]["graph"]["replays"] < 0.5 * sum(results[name]["modes"].values())
