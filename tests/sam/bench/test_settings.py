"""What each variant's engine is told, and its environment."""

from types import SimpleNamespace

import pytest

from sam.bench.engines import environment_of, vllm_plugins
from sam.bench.settings import parse
from sam.config import HUGE_PAGES, SpeculationConfig

ENGINE = ["--dtype", "float32"]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return lambda *words: parse(["--model", str(tmp_path), *words, *ENGINE])


def test_stock_gets_nothing_of_this_project(settings, tmp_path):
    common = {"model": str(tmp_path), "engine": ENGINE, "is_stock": True, "forces_text": False}
    assert settings().start("stock") == settings().start("stock-v1") == common | {"speculation": None}
    own = {"method": "ngram_gpu", "num_speculative_tokens": 8}
    assert settings("--text", "a").start("stock-ngram_gpu") == common | {"speculation": own, "forces_text": True}


def test_the_others_get_whole_settings_of_speculation(settings):
    def speculation(variant, *words):
        found = SpeculationConfig.from_dict(settings(*words).start(variant)["speculation"])
        assert found.verification == "exact"
        return found.method, found.policy, found.num_speculative_tokens, found.paths, found.draft_model

    assert speculation("off")[0] == "off" and speculation("ngram")[0] == "ngram"
    assert speculation("sam")[:4] == ("sam", "goodput", 8, 1) and speculation("sam-k2")[:3] == ("sam", "always", 2)
    assert speculation("sam-paths4")[:4] == ("sam", "goodput", 8, 4)
    assert speculation("sam-k2-paths3")[:4] == ("sam", "always", 2, 3)
    trained = ["--variants", "off", "hybrid", "--draft-model", "/draft"]
    assert speculation("hybrid", *trained) == ("hybrid", "goodput", 8, 1, "/draft")


def test_stock_loads_every_plugin_but_ours():
    places = {"sam": "general_plugins", "ascend": "platform_plugins"}
    plugins = [SimpleNamespace(name=n, value=f"{n}.vllm.plugin:f", group=f"vllm.{g}") for n, g in places.items()]
    plugins.append(SimpleNamespace(name="cli", value="other:main", group="console_scripts"))
    assert vllm_plugins(plugins, True, None) == ["ascend"]  # the platform stays
    assert vllm_plugins(plugins[:1], True, None) == []
    assert vllm_plugins(plugins, True, ["sam", "mine"]) == ["mine"]
    assert vllm_plugins(plugins, False, None) is None
    assert vllm_plugins(plugins, False, ["mine"]) == ["mine", "sam"]


def test_variables_of_the_processes(monkeypatch):
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", *HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    stock, ours = environment_of("stock"), environment_of("sam")
    assert "sam" not in stock["VLLM_PLUGINS"].split(",") and "VLLM_PLUGINS" not in ours
    assert "VLLM_USE_V2_MODEL_RUNNER" not in stock and ours["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not HUGE_PAGES.keys() & stock.keys() and ours.items() >= HUGE_PAGES.items()
    assert stock["HF_HUB_OFFLINE"] == ours["HF_HUB_OFFLINE"] == "0"
