"""SpeculationConfig: checked when it is made, and the same after its way into an engine process."""

import json
from types import SimpleNamespace

import pytest

from sam.config import SpeculationConfig


def test_it_comes_back_equal_through_vllms_json():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    sent = SpeculationConfig(policy="threshold", scope="history", verification="rejection", corpus=("a", "b"))
    additional = json.dumps(sent.vllm_arguments()["additional_config"])
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--additional-config", additional])
    arguments = EngineArgs.from_cli_args(parsed)
    assert SpeculationConfig.from_vllm(arguments) == sent != SpeculationConfig()


@pytest.mark.parametrize(
    ("additional", "drafter", "expected"),
    [
        (None, None, None),
        ({"speculation": {}}, None, SpeculationConfig()),
        ({"speculation": {"batch_size_threshold": 4}}, None, SpeculationConfig(batch_size_threshold=4)),
        (None, "sam.SamProposer", SpeculationConfig()),  # the drafter's name alone
        ({"speculation": {"policy": "always"}}, "sam.SamProposer", SpeculationConfig(policy="always")),
        ({}, "ngram", None),  # vLLM's own asks for nothing
    ],
)
def test_what_an_engine_asks_for(additional, drafter, expected):
    speculative = drafter and SimpleNamespace(model=drafter)
    engine = SimpleNamespace(additional_config=additional, speculative_config=speculative)
    assert SpeculationConfig.from_vllm(engine) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"verification": "fast"}, "speculation.verification='fast': expected one of exact, rejection"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True: expected an integer from 1 to 15"),
        ({"nonsense": 1}, "speculation.nonsense is unknown: the keys are method, "),
        ({"history_path": "x"}, "history_path=x: unused with speculation.scope=group: set the scope to history, or "),
        ({"sharing": "replicas", "scope": "request"}, "sharing=replicas: speculation.scope=request drafts from no"),
        ({"corpus": [3]}, "speculation.corpus=\\(3,\\): expected a path, or a list of paths"),
        ({"corpus": "x", "cross_prompt": False}, "speculation.corpus: with speculation.cross_prompt=false there is no"),
        ({"method": "eagle3"}, "speculation.draft_model=None: speculation=eagle3 needs one: name its folder"),
        ({"paths": 2, "method": "ngram"}, "speculation.paths=2: speculation=ngram drafts one path: set paths to 1"),
        ({"paths": 2, "verification": "rejection"}, "paths=2: verification=rejection verifies one path: set verif"),
    ],
)
def test_values_outside_their_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig.from_dict(values)


@pytest.mark.parametrize(
    ("engine", "scheduling", "expected"),
    [
        (("cuda",), "auto", True),
        (("cuda",), "off", False),
        (("cuda", 1, False), "auto", False),
        (("cpu",), "auto", False),
        (("npu",), "auto", True),
        (("npu", 2), "auto", False),
    ],
)
def test_where_sam_is_scheduled_asynchronously(engine, scheduling, expected):
    config = SpeculationConfig(async_scheduling=scheduling)
    assert config.schedules_asynchronously(*engine) is expected
    drafter = config.vllm_arguments(expected)["speculative_config"]
    assert drafter.get("method") == ("ngram_gpu" if expected else None) and drafter["num_speculative_tokens"] == 8
    assert not SpeculationConfig(method="off", async_scheduling=scheduling).schedules_asynchronously(*engine)
    for method in ("draft_model", "hybrid", "eagle3"):
        trained = SpeculationConfig(method, "folder", async_scheduling=scheduling)
        assert trained.schedules_asynchronously(*engine) is expected
        asked = trained.vllm_arguments(expected)["speculative_config"]
        assert ("disable_padded_drafter_batch" in asked) is not expected, "vLLM combines the two as little"


def test_hybrid_takes_what_its_folder_holds(tmp_path):
    for written, expected in (
        ('{"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}', "eagle3"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "draft_model"),
        ("{", "draft_model"),
    ):
        (tmp_path / "config.json").write_text(written)
        asked = SpeculationConfig("hybrid", str(tmp_path)).vllm_arguments()["speculative_config"]
        assert asked["method"] == expected


def test_a_corpus_is_a_path_or_a_list_of_them():
    given = [SpeculationConfig.from_dict({"corpus": value}).corpus for value in ("a", ["a", "b"], None)]
    assert given == [("a",), ("a", "b"), ()]


def test_yamls_off_is_a_word():
    for key in ("batch_invariant", "async_scheduling"):
        assert getattr(SpeculationConfig.from_dict({key: False}), key) == "off"
