"""Settings of a measurement, refused before anything starts, and what each variant's engine is told."""

from types import SimpleNamespace

import pytest

from sam.bench.environment import HUGE_PAGES, environment_of, vllm_plugins
from sam.bench.settings import Settings, engine_names, engine_value, speculation_of
from sam.config import SpeculationConfig

COMMON = {
    "model": "/model", "prompts": "digest", "requests": [1, 8], "samples": 4, "responses": 4, "max_tokens": 16,
    "temperature": 1.0, "variants": ["stock", "off", "sam"], "draft_tokens": 8, "ignore_eos": False, "seeds": True,
    "engine": [],
}  # fmt: skip


def settings(**changed) -> Settings:
    return Settings(**COMMON | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"samples": 0}, "--samples 0: expected 1 or more"),
        ({"responses": 0}, "--responses 0: expected 1 or more"),
        ({"max_tokens": -1}, "--max-tokens -1"),
        ({"requests": [4, 4]}, "--requests 4 4"),
        ({"requests": [0]}, "--requests 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"variants": ["stock", "eagle"]}, "--variants eagle: expected some of stock, stock-v1, off, sam, ngram, "),
        ({"variants": ["off", "sam-paths1"]}, "--variants sam-paths1: expected some of .*, sam-paths2 to sam-paths8"),
        ({"variants": ["off", "sam-k16"]}, "--variants sam-k16: expected some of .*, sam-k1 to sam-k15"),
        ({"variants": ["off", "off"]}, "one comes twice"),
        ({"variants": ["sam", "ngram"]}, "expected stock or off among them"),
        ({"variants": ["off", "hybrid"]}, "--variants hybrid: it needs --draft-model DIR"),
        ({"variants": ["stock", "draft_model"]}, "--variants draft_model: it needs --draft-model DIR"),
        ({"draft_model": "/draft"}, "--draft-model /draft: no variant drafts with it: add draft_model or hybrid"),
        ({"draft_tokens": 16}, "num_speculative_tokens=16"),
        ({"engine": ["--speculative-config={}"]}, "--speculative-config: the variants set it"),
        ({"engine": ["--additional_config.x", "1"]}, "--additional-config: the variants set it"),
    ],
)
def test_what_cannot_be_measured_with(changed, message):
    with pytest.raises(ValueError, match=message) as caught:
        settings(**changed)
    assert "\n" not in str(caught.value)


def test_suffix_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--variants suffix: it needs arctic-inference"):
        settings(variants=["stock", "suffix"])


def test_stock_gets_nothing_of_this_project():
    started = settings(engine=["--dtype", "float32"]).start("stock", memory_is_set=True)
    engine = {"variant": "stock", "model": "/model", "engine": ["--dtype", "float32"]}
    assert started == engine | {"speculation": None, "stock_speculation": None, "forces_text": False}
    assert settings(text="a.npz").start("stock", memory_is_set=True)["forces_text"]


def test_without_a_tokenizer_vllm_starts_none():
    started = settings(has_tokenizer=False).start("off", memory_is_set=True)
    assert started["engine"] == ["--skip-tokenizer-init"]
    own = settings(has_tokenizer=False, engine=["--skip-tokenizer-init"]).start("off", memory_is_set=True)
    assert own["engine"] == ["--skip-tokenizer-init"]


@pytest.mark.parametrize("variant", ["off", "sam", "ngram"])
def test_the_others_get_whole_settings_of_speculation(variant):
    speculation = SpeculationConfig.from_dict(settings().start(variant, memory_is_set=True)["speculation"])
    assert speculation.method == variant and speculation.verification == "exact"
    if variant == "sam":
        assert (speculation.policy, speculation.num_speculative_tokens) == ("goodput", 8)
    assert speculation_of("off", 8) == {"method": "off"}
    assert speculation_of("sam-k2", 8) == {"method": "sam", "policy": "always", "num_speculative_tokens": 2}
    assert speculation_of("sam-paths4", 8) == speculation_of("sam", 8) | {"paths": 4}
    assert speculation_of("sam-k2-paths3", 8) == speculation_of("sam-k2", 8) | {"paths": 3}


@pytest.mark.parametrize("variant", ["draft_model", "hybrid"])
def test_those_with_a_draft_model_get_its_folder_and_goodput(variant):
    of_both = settings(variants=["off", "draft_model", "hybrid"], draft_model="/draft")
    speculation = SpeculationConfig.from_dict(of_both.start(variant, memory_is_set=True)["speculation"])
    assert (speculation.method, speculation.draft_model, speculation.policy) == (variant, "/draft", "goodput")
    assert speculation.verification == "exact" and speculation.num_speculative_tokens == 8
    assert of_both.difference(vars(settings())) is not None


@pytest.mark.parametrize("engine, memory_is_set", [([], True), (["--kv-cache-memory-bytes=1000"], False)])
def test_engines_share_the_memory_unless_the_user_says_how_much(engine, memory_is_set):
    assert settings().start("off", False)["engine"] == ["--gpu-memory-utilization", "0.2"]
    assert settings(engine=engine).start("off", memory_is_set)["engine"] == engine


def test_words_of_the_engine():
    words = ["--max-model-len", "512", "--enforce-eager", "--kv_cache_memory_bytes=9"]
    assert engine_names(words) == {"max_model_len", "enforce_eager", "kv_cache_memory_bytes"}
    assert engine_value(words, "max_model_len") == "512" and engine_value(words, "kv_cache_memory_bytes") == "9"
    assert engine_value(words, "dtype") is None


def test_a_difference_is_named():
    earlier = vars(settings())
    assert settings().difference(earlier) is None
    assert settings(max_tokens=32).difference(earlier) == "max-tokens was 16, now 32"
    assert settings(responses=8).difference(earlier) == "responses was 4, now 8"


def test_rounds_of_an_earlier_version_were_one_batch():
    earlier = {name: value for name, value in vars(settings()).items() if name != "responses"}
    assert settings(responses=1).difference(earlier) is None
    assert settings().difference(earlier) == "responses was 1, now 4"


def plugin(name, value, group="vllm.general_plugins"):
    return SimpleNamespace(name=name, value=value, group=group)


PLUGINS = [
    plugin("sam", "sam.vllm.plugin:register"),
    plugin("ascend", "vllm_ascend:register", "vllm.platform_plugins"),
    plugin("cli", "other:main", "console_scripts"),
]


def test_stock_loads_every_plugin_but_ours():
    assert vllm_plugins(PLUGINS, True, None) == ["ascend"]  # the platform stays
    assert vllm_plugins(PLUGINS[:1], True, None) == []
    assert vllm_plugins(PLUGINS, True, ["sam", "mine"]) == ["mine"]
    assert vllm_plugins(PLUGINS, False, None) is None
    assert vllm_plugins(PLUGINS, False, ["mine"]) == ["mine", "sam"]


def test_variables_of_the_processes(monkeypatch):
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", *HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    stock, ours = environment_of("stock"), environment_of("sam")
    assert "sam" not in stock["VLLM_PLUGINS"].split(",") and "VLLM_PLUGINS" not in ours
    assert "VLLM_USE_V2_MODEL_RUNNER" not in stock and ours["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not HUGE_PAGES.keys() & stock.keys() and ours.items() >= HUGE_PAGES.items()
    assert stock["HF_HUB_OFFLINE"] == ours["HF_HUB_OFFLINE"] == "0"
