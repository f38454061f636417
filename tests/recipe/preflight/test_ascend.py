"""Preflight for Ascend: pairing, patches, graph mode and lossy settings, each with its mend."""

import pytest

from recipe.launch import source_patches, versions
from recipe.launch.config import compose_config
from recipe.preflight import ascend, checks
from tests.recipe.preflight.preflight_node import ASCEND_PACKAGES

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


@pytest.fixture
def paired(monkeypatch, tmp_path):
    """A machine with the right packages and CANN, patched."""
    original = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: ASCEND_PACKAGES.get(name) or original(name))
    information = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    information.parent.mkdir()
    information.write_text("package_name=Ascend-cann-toolkit\nversion=9.0.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    return information


def found(*overrides):
    config = compose_config("dapo_tiny_cpu", ["trainer.device=npu", *overrides])
    asked = [check for check in checks.CHECKS if "npu" in check.scopes and "start" in check.scopes]
    return [problem for check in asked for problem in check.find(config)], list(ascend.find_warnings(config))


def test_a_good_machine_has_no_problem(paired):
    assert found() == ([], [])


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("additional_config.rejection_sampler_config.enable_block_verify", "ascend.lossy"),
        ("additional_config.rejection_sampler_config.enable_entropy_verify", "ascend.lossy"),
        ("additional_config.enable_reduce_sample", "ascend.lossy"),
    ],
)
def test_settings_that_cannot_be(paired, key, code):
    (problem,) = found(f"+{VLLM}.{key}=true")[0]
    assert (problem.code, problem.value) == (code, f"{VLLM}.{key}=True")


@pytest.mark.parametrize("choice", ["speculation=ngram", "speculation.async_scheduling=off"])
def test_asynchronous_scheduling_forced_on_a_drafter_that_has_none(paired, choice):
    key = f"{VLLM}.async_scheduling"
    (problem,) = found(f"+{key}=true", choice)[0]
    assert (problem.code, problem.value) == ("ascend.scheduling", f"{key}=True")
    assert found(f"+{key}=true") == found(f"+{key}=true", "speculation=off") == ([], [])


def graphs(mode, *more):
    rollout = "actor_rollout_ref.rollout"
    return f"{rollout}.enforce_eager=false", f"+{VLLM}.compilation_config.cudagraph_mode={mode}", *more


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_graph_mode_goes_with_sam(paired, mode):
    assert found(*graphs(mode)) == ([], [])


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "speculation=ngram",
            "set actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL",
        ),
        ("speculation.draft_shape=ragged", "set draft_shape to auto"),
    ],
)
def test_ragged_drafts_with_decode_only_graphs_are_warned_of(paired, choice, said):
    problems, (warning,) = found(*graphs("FULL_DECODE_ONLY", choice))
    assert problems == [] and said in warning
    assert found(*graphs("FULL", choice)) == ([], [])


def test_graphs_that_vllm_ascend_cannot_do_are_refused_with_the_mode_that_works(paired):
    (problem,) = found(*graphs("FULL", f"+{VLLM}.compilation_config.mode=0"))[0]
    assert problem.code == "ascend.graph_mode" and "unset mode" in problem
    parallel = "actor_rollout_ref.rollout.data_parallel_size=2"
    refused = [one for one in found(*graphs("FULL_DECODE_ONLY", parallel))[0] if one.code == "ascend.graph_mode"]
    assert len(refused) == 1 and "set cudagraph_mode=FULL" in refused[0]
    assert not [one for one in found(*graphs("FULL", parallel))[0] if one.code == "ascend.graph_mode"]


@pytest.mark.parametrize("package", ["torch-npu", "vllm-ascend"])
def test_wrong_pairing(paired, package, monkeypatch):
    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "0.1" if name == package else known(name))
    (problem,) = checks._versions(compose_config("dapo_tiny_cpu", ["trainer.device=npu"]))
    assert (problem.code, problem.value) == ("package.version", f"{package} 0.1, expected {ASCEND_PACKAGES[package]}")


def test_cann(paired):
    config = compose_config("dapo_tiny_cpu", ["trainer.device=npu"])
    assert list(checks._versions(config)) == []
    paired.write_text("version=8.3.RC1\n")
    assert [one.value for one in checks._versions(config)] == ["CANN 8.3.RC1, expected 9.*"]
    paired.unlink()
    assert [one.value for one in checks._versions(config)] == ["CANN is not installed, expected 9.*"]


@pytest.mark.parametrize("state", ["published", "half-applied", "wrong version", "edited"])
def test_anything_but_the_patched_packages_is_refused(paired, state, monkeypatch):
    (series,) = source_patches.load()
    series.installed = "0.18.0" if state == "wrong version" else series.version
    names = list(series.hashes)
    series.states = dict.fromkeys(names, "published")
    if state == "half-applied":
        series.states[names[0]] = "patched"
    if state == "edited":
        series.states[names[0]] = "edited"
    monkeypatch.setattr(source_patches, "load", lambda: [series])
    problems, _ = found()
    assert [one.code for one in problems] == ["ascend.patches"]
    assert series.problem() == f"{problems[0].value}: {problems[0].remedy}"
    assert series.state == state


def test_more_than_15_draft_tokens_are_refused():
    from recipe.launch.config import ConfigError

    with pytest.raises(ConfigError, match="num_speculative_tokens=16: expected an integer from 1 to 15"):
        compose_config("dapo_tiny_cpu", ["speculation.num_speculative_tokens=16"])


def test_the_users_additional_config_is_kept():
    config = compose_config("dapo_tiny_cpu", [f"+{VLLM}.additional_config.enable_cpu_binding=true"])
    additional = config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config
    assert additional.enable_cpu_binding is True and additional.speculation.method == "sam"


def test_preflight_asks_only_where_the_device_is_an_npu():
    config = compose_config("dapo_tiny_cpu", [])
    assert "npu" not in {scope for check in checks.select(config) for scope in check.scopes}
    config.trainer.device = "npu"
    assert "npu" in {scope for check in checks.select(config) for scope in check.scopes}
