"""Preflight for Ascend: pairing, patches, graph mode and lossy settings, each with its mend."""

import pytest

from recipe.launch import source_patches, versions
from recipe.launch.config import compose_config
from recipe.preflight import ascend, checks

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


@pytest.fixture
def paired(monkeypatch, tmp_path):
    """A machine with the right packages and CANN, patched."""
    original = versions.installed
    wanted = {**ascend.REQUIRED, "torch": versions.TORCH["npu"]}
    monkeypatch.setattr(versions, "installed", lambda name: wanted.get(name) or original(name))
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
        ("async_scheduling", "ascend.scheduling"),
    ],
)
def test_settings_that_cannot_be(paired, key, code):
    (problem,) = found(f"+{VLLM}.{key}=true")[0]
    assert (problem.code, problem.value) == (code, f"{VLLM}.{key}=True")


def test_decode_only_graphs_are_warned_of_with_the_counts(paired):
    override = f"+{VLLM}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY"
    problems, warnings = found(override)
    assert problems == [] and "20 of 92" in warnings[0] and "cudagraph_mode=FULL" in warnings[0]
    assert found(override, "speculation=off") == ([], [])


@pytest.mark.parametrize("package", ["torch-npu", "vllm-ascend"])
def test_wrong_pairing(paired, package, monkeypatch):
    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "0.1" if name == package else known(name))
    (problem,) = checks._versions(compose_config("dapo_tiny_cpu", ["trainer.device=npu"]))
    assert (problem.code, problem.value) == ("package.version", f"{package} 0.1, expected {ascend.REQUIRED[package]}")


def test_cann(paired):
    paired.write_text("version=8.3.RC1\n")
    assert [(one.code, one.value) for one in found()[0]] == [("ascend.cann", "CANN 8.3.RC1")]
    paired.unlink()
    assert [one.code for one in found()[0]] == ["ascend.cann"]


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
