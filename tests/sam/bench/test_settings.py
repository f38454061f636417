"""What each variant's engine is told, and its environment."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from sam.bench import engines
from sam.bench.engines import environment_of
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


@pytest.mark.parametrize(
    ("chosen", "stock", "ours"),
    [(None, "ascend", None), ("sam,mine", "mine", "mine,sam"), ("mine", "mine", "mine,sam")],
)
def test_variables_of_the_processes_stock_loads_every_plugin_but_ours(monkeypatch, chosen, stock, ours):
    places = {"sam": "vllm.general_plugins", "ascend": "vllm.platform_plugins", "cli": "console_scripts"}
    plugins = [EntryPoint(name, f"{name}.vllm.plugin:f", group) for name, group in places.items()]
    monkeypatch.setattr(engines, "distributions", lambda: [SimpleNamespace(entry_points=plugins)])
    monkeypatch.setattr(engines, "vllm_version", lambda: "0.23.0+cpu")
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", *HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    if chosen:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    theirs, own = environment_of("stock"), environment_of("sam")
    assert (theirs.get("VLLM_PLUGINS"), own.get("VLLM_PLUGINS")) == (stock, ours)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in theirs and own["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not HUGE_PAGES.keys() & theirs.keys() and own.items() >= HUGE_PAGES.items()
    assert theirs["HF_HUB_OFFLINE"] == own["HF_HUB_OFFLINE"] == "0"
