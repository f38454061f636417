"""Which drafter and sampler would run, loaded by vLLM's own code."""

import importlib.metadata
import sys

import pytest

from recipe.launch import source_patches
from recipe.launch.config import compose_config
from recipe.preflight import speculation

CPU = "dapo_tiny_cpu"
EXACT = "sam.vllm.exact_sampler.ExactSampler"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)


def resolve(*overrides, name=CPU):
    return speculation.resolve(compose_config(name, list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "drafter", "sampler"),
    [
        ([], "sam.vllm.proposer.SamProposer, made by vllm.v1", EXACT),
        (
            ["speculation=ngram"],
            "ngram, vLLM's own",
            EXACT,
        ),
        (["speculation=off"], "none", EXACT),
        (["speculation=hybrid"], "sam.vllm.trained.proposer.TrainedProposer, in place of vLLM's", EXACT),
        (["speculation=eagle3"], "sam.vllm.trained.eagle.Eagle3Proposer, in place of vLLM's EagleProposer", EXACT),
        (
            ["speculation.verification=rejection"],
            "sam.vllm.proposer.SamProposer",
            "sam.vllm.rejection_sampler.Rejection",
        ),
    ],
)
def test_what_would_load(overrides, drafter, sampler):
    found, problems = resolve(*overrides)
    assert problems == [] and found["drafter"].startswith(drafter) and found["sampler"].startswith(sampler)
    assert found["sampler"].endswith(f"put there by the plugin after {speculation.VLLM_RUNNER}.load_model")


def test_ranks_that_could_not_agree_on_drafts_are_refused():
    found, problems = resolve(name="dapo_qwen3_8b_cuda")
    assert found["drafter"].startswith("sam.vllm.async_proposer.AsyncSamProposer")
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.prefill_context_parallel_size"
    for more in ([], ["speculation.async_scheduling=off"]):
        found, problems = resolve(f"{key}=2", *more, name="dapo_qwen3_8b_cuda")
        said = [one for one in problems if "prefill_context_parallel_size=2" in one]
        assert len(said) == (not more), problems


def test_suffix_needs_its_package(monkeypatch):
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: False)
    found, (problem,) = resolve("speculation=suffix")
    assert problem.code == "drafter.load" and problem.startswith("the drafter: Arctic Inference is required")
    assert found["drafter"] == "would not load"


def test_a_drafter_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "sam.vllm.proposer", None)
    _, (problem,) = resolve()
    assert problem.code == "drafter.load" and "Cannot import module 'sam.vllm.proposer'" in problem


def test_a_plugin_that_is_not_registered(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    _, (problem,) = resolve()
    assert problem.code == "drafter.load" and "the plugin `sam` is not registered with vLLM" in problem


def test_a_vllm_that_the_plugin_does_not_reach(monkeypatch):
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
    _, (problem,) = resolve()
    assert problem.code == "drafter.load" and "leaves vLLM's workers as they are" in problem


@pytest.mark.parametrize(
    ("installed", "state", "said"),
    [(None, None, "once vllm-ascend is installed and patched"), ("0.23.0.post1", "patched", "as patched")],
)
def test_on_ascend_the_patches_decide(monkeypatch, installed, state, said):
    (series,) = source_patches.load()
    series.installed, series.states = installed, dict.fromkeys(series.hashes, state)
    monkeypatch.setattr(source_patches, "load", lambda: [series])
    found, problems = resolve(name="dapo_qwen3_32b")
    assert problems == []
    assert found["drafter"].startswith("sam.vllm.ascend.async_proposer.AscendAsyncSamProposer")
    assert found["drafter"].endswith(f"AscendNgramProposerNPU {said}")
    found, problems = resolve("speculation.async_scheduling=off", name="dapo_qwen3_32b")
    assert problems == []
    assert found["drafter"].endswith(f"custom_class_proposer, which vllm_ascend.spec_decode calls {said}")
    assert found["sampler"].endswith(f"NPUModelRunner.load_model {said}")


def test_on_ascend_without_patches_neither_would_load(monkeypatch):
    (series,) = source_patches.load()
    series.installed, series.states = series.version, dict.fromkeys(series.hashes, "published")
    monkeypatch.setattr(source_patches, "load", lambda: [series])
    _, problems = resolve(name="dapo_qwen3_32b")
    assert [one.code for one in problems] == ["drafter.load"] * 2
    assert [one.value for one in problems] == [f"the {part}: {series.problem()}" for part in ("drafter", "sampler")]
