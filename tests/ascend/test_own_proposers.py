"""vllm-ascend's own EAGLE and MTP proposers beside this project's patches: dispatched, verified exactly, replayed.

Which class each method of this project gets is in test_engine.py.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed
from tests.ascend.draft_models import Eagle3Head, save_eagle, save_eagle3, save_mimo, save_target
from tests.ascend.engines import assert_same, counted, generate_all, of_model

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"
MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE")
K = 3
SAMPLED = {"temperature": 0.4}
OFF = {"off": {}, "sampled off": SAMPLED, "long off": {"workload": "long"}}
SYNCHRONOUS = {"async_scheduling": False}  # where vLLM itself would schedule these methods asynchronously
ASYNCHRONOUS = {"async_scheduling": None, "verification": "rejection"}
MTP = {
    "mtp off": {},
    "mtp": {"method": "mtp"} | SYNCHRONOUS,
    "mtp rejection": {"method": "mtp"} | ASYNCHRONOUS,
    "deepseek_mtp": {"method": "deepseek_mtp"} | SYNCHRONOUS,
    "mtp sampled off": SAMPLED,
    "mtp sampled": {"method": "mtp"} | SAMPLED | SYNCHRONOUS,
    "FULL mtp": {"method": "mtp", "graph": "FULL"} | SYNCHRONOUS,
    "mtp refused": {"method": "mtp", "refused": True},
}


def eagles(eagle3: dict, eagle: dict) -> dict[str, dict]:
    unpadded = eagle3 | {"method": "eagle3 unpadded"}  # as this project asks for a head
    return {
        "eagle3": eagle3,
        "eagle3 sampled": eagle3 | SAMPLED,
        "eagle3 unpadded": unpadded,
        "eagle3 never": eagle3 | {"policy": "never"},
        "eagle3 rejection": eagle3 | ASYNCHRONOUS,
        "eagle3 preempted": eagle3 | {"workload": "long", "blocks": 10},
        "eagle": eagle,
        "unpadded refused": unpadded | {"graph": "FULL", "refused": True},
    }


def graphs(eagle3: dict) -> dict[str, dict]:
    modes = {f"{mode} eagle3": eagle3 | {"graph": mode} for mode in MODES}
    return modes | {"FULL eagle3 rejection": eagle3 | {"graph": "FULL"} | ASYNCHRONOUS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results by scenario; the target with transformers; folders of the models."""
    folder = tmp_path_factory.mktemp("models")
    network = save_target(folder / "target")
    save_eagle(folder / "eagle")
    save_mimo(folder / "mimo")
    off = generate_all(of_model(folder / "target", OFF), of_model(folder / "mimo", MTP))
    texts = [prompt + tokens for prompt, tokens in zip(off["off"]["prompts"], off["off"]["tokens"], strict=True)]
    save_eagle3(folder / "eagle3", network, texts)
    eagle3, eagle = ({"method": name, "draft_model": str(folder / name)} | SYNCHRONOUS for name in ("eagle3", "eagle"))
    ranks = {"eagle3 ranks": eagle3 | {"tensor_parallel": 2}}
    jobs = [of_model(folder / "target", one) for one in (eagles(eagle3, eagle), graphs(eagle3), ranks)]
    return SimpleNamespace(results=off | generate_all(*jobs), network=network, folder=folder)


@pytest.fixture(scope="module")
def results(made):
    return made.results


DRAFTED = [name for name in eagles({}, {}) | graphs({}) | MTP if not name.endswith(("off", "refused"))]
REFERENCES = {
    "eagle3 sampled": "sampled off",
    "eagle3 preempted": "long off",
    "mtp sampled": "mtp sampled off",
    **dict.fromkeys(("mtp", "mtp rejection", "deepseek_mtp", "FULL mtp"), "mtp off"),
}


@pytest.mark.parametrize("name", DRAFTED)
def test_vllm_ascends_own_proposer_drafts(results, name):
    """The patches leave its dispatch as it is; MTP has no class of its own in 0.23.0.post1."""
    result = results[name]
    assert result["status"]["drafter"] == "AscendEagleProposer"
    assert result["drafted"] > 1000 and 5 < result["accepted"] < result["drafted"]


@pytest.mark.parametrize("name", DRAFTED)
def test_the_same_tokens_and_log_probabilities(results, name):
    assert_same(results, name, REFERENCES.get(name, "off"))


def test_the_same_on_two_ranks(results):
    assert_same(results, "eagle3 ranks", "off", 1e-4)
    assert results["eagle3 ranks"]["accepted"] > 5


def test_every_step_was_sampled_by_what_is_installed(results):
    for name in ("eagle3", "eagle3 sampled", "eagle", "mtp", "mtp sampled"):
        status = results[name]["status"]
        assert status["verification"] == "exact"
        assert status["sampled_steps"] == len(results[name]["steps"])
    assert results["eagle3 preempted"]["preemptions"] > 0
    for name in ("eagle3 rejection", "mtp rejection"):
        status = results[name]["status"]
        assert status["verification"] == "rejection" and status["asynchronous"]
        assert status["sampled_steps"] == sum(step["drafts"] > 0 for step in results[name]["steps"])


def test_exact_verification_refuses_them_under_asynchronous_scheduling(results):
    """There vLLM counts all their drafts as accepted until the device has said otherwise."""
    assert re.search("verification=exact.*'mtp'.*async_scheduling=False", results["mtp refused"]["refused"])


def replays(step: dict) -> int:
    return counted(step, "graph of")


@pytest.mark.parametrize("name", [*(f"{mode} eagle3" for mode in MODES[:3]), "FULL eagle3 rejection", "FULL mtp"])
def test_a_step_with_drafts_replays_the_targets_graph_and_the_heads(results, name):
    """The head's k passes are one graph. Attention's arguments are updated for two layers, and for each pass."""
    decodes = [step for step in results[name]["steps"] if step["drafts"] and step["decodes"]]
    assert len(decodes) > 60
    assert {(step["graph"], replays(step), counted(step, "update of")) for step in decodes} == {("FULL", 2, 2 + K)}


def test_in_pieces_the_head_runs_eager(results):
    """A graph for each of the target's three pieces, as without a head."""
    decodes = [step for step in results["PIECEWISE eagle3"]["steps"] if step["decodes"]]
    assert {(step["graph"], replays(step)) for step in decodes} == {("PIECEWISE", 3)}


@pytest.mark.parametrize("name", [*(f"{mode} eagle3" for mode in MODES), "FULL mtp"])
def test_the_recorder_counts_the_steps_that_replay(results, name):
    steps = results[name]["steps"]
    phases = [[step for step in steps if bool(step["drafts"]) == has_drafts] for has_drafts in (True, False)]
    assert [*results[name]["replays"].values()] == [
        [sum(replays(step) > 0 for step in phase), len(phase)] for phase in phases
    ]


def right_drafts(made, name: str) -> tuple[int, int]:
    """Drafts that are the published head's, computed with transformers, and all drafts."""
    head, result = Eagle3Head(made.network, made.folder / "eagle3"), made.results[name]
    texts = [prompt + tokens for prompt, tokens in zip(result["prompts"], result["tokens"], strict=True)]
    with torch.no_grad():
        right = [head.draft(texts[row][:length], len(draft)) == draft for row, length, draft in result["drafts"]]
    return sum(right), len(right)


def test_drafts_are_the_published_heads_where_the_batch_is_not_padded(made):
    """Padded, vllm-ascend's later passes attend to rejected tokens too."""
    right, drafts = right_drafts(made, "eagle3 unpadded")
    assert right == drafts > 400
    padded, of_padded = right_drafts(made, "eagle3")
    assert padded < of_padded == drafts
    expected = f"{padded} of {drafts} drafts are the published head's, computed with transformers"
    assert expected in " ".join(PAGE.read_text().split()), f"docs/ascend.md should say: {expected}"


def test_the_switch_does_not_reach_vllm_ascends_proposer(made):
    """Why preflight refuses eagle3 there: as many drafts with the policy `never`, and a check at start that fails."""
    never, always = (made.results[name] for name in ("eagle3 never", "eagle3"))
    steps = [[(step["rows"], step["tokens"], step["drafts"]) for step in one["steps"]] for one in (never, always)]
    assert never["drafted"] == always["drafted"] and steps[0] == steps[1]
    wanted = SpeculationConfig(method="eagle3", draft_model=str(made.folder / "eagle3"))
    with pytest.raises(RuntimeError, match="drafter AscendEagleProposer, expected Eagle3Proposer"):
        check_installed(wanted, never["status"])


def test_vllm_ascend_refuses_an_unpadded_batch_with_whole_graphs(results):
    """As this project asks for a head, since its switch decides on the host."""
    assert "only supports padded drafter batch" in results["unpadded refused"]["refused"]


def test_the_pages_table_holds_these_counts(results):
    counts = {mode: results[f"{mode} eagle3"]["steps"] for mode in MODES}
    target = [f"{sum(replays(step) > 0 for step in steps)} of {len(steps)}" for steps in counts.values()]
    whole = [f"{sum(replays(step) == 2 for step in steps)} of {len(steps)}" for steps in counts.values()]
    lines = ["| | " + " | ".join(MODES) + " |", "|---" * (1 + len(MODES)) + "|"]
    lines += [f"| {words} | " + " | ".join(cells) + " |" for words, cells in (("target", target), ("head", whole))]
    expected = "\n".join(lines)
    assert expected in PAGE.read_text(), f"docs/ascend.md should say:\n{expected}"
