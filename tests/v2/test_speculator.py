"""The speculator's contract with the runner, without an engine: what it drafts, shares and keeps; what is refused."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.spec_decode.speculator")

from sam.config import SpeculationConfig
from sam.sharing.client import Client
from sam.vllm.v2 import engine
from sam.vllm.v2.speculator import STEPS_UNDER_WAY, SamSpeculator
from tests.sam.sharing.channel import Channel

K = 3


def config(**speculation):
    return SimpleNamespace(
        additional_config={"speculation": {"method": "sam", "policy": "always", **speculation}},
        model_config=SimpleNamespace(max_model_len=32, model="none", enforce_eager=True),
        speculative_config=SimpleNamespace(num_speculative_tokens=K, method="ngram_gpu", model="ngram_gpu"),
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=False, scheduler_cls=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A rank without others."""
    rank = SimpleNamespace(is_first_rank=True, broadcast=lambda tensor: tensor)
    monkeypatch.setattr("sam.vllm.v2.speculator.get_tp_group", lambda: rank)


def propose(speculator, tokens, budget=K):
    """What is drafted after a step that brought each request these tokens."""
    rows = np.full((len(tokens), K + 1), 999, np.int64)
    for row, kept in enumerate(tokens.values()):
        rows[row, : len(kept)] = kept
    counts = np.array([len(kept) for kept in tokens.values()], np.int32)
    copied = SimpleNamespace(synchronize=lambda: None)
    speculator.keep(SimpleNamespace(sampled_token_ids=rows, num_sampled_tokens_np=counts, copy_event=copied))
    batch = SimpleNamespace(req_ids=list(tokens), num_reqs=len(tokens))
    drafts = speculator.propose(batch, *[None] * 10, num_speculative_tokens=budget)
    assert drafts.shape == (len(tokens), K) and drafts.dtype == torch.int64
    assert (drafts >= 0).all() and (drafts < 999).all() and speculator.counters["draft_errors"] == 0
    return drafts.tolist()


def schedule(speculator, **prompts):
    new = [
        SimpleNamespace(req_id=name, prefill_token_ids=text, prompt_len=len(text), sampling_params=None)
        for name, text in prompts.items()
    ]
    speculator.schedule(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(), num_scheduled_tokens=prompts))


def test_drafts_come_from_siblings_and_rows_without_are_filled_up():
    speculator = SamSpeculator(config(), torch.device("cpu"))
    schedule(speculator, a=[1, 2, 3], b=[1, 2, 3], c=[9])
    propose(speculator, {"a": [4, 5, 6], "b": [], "c": []})
    for step in range(8):  # while drafting is off nothing is waited for, and nothing missed
        propose(speculator, {"a": [7 + step], "b": [], "c": []}, budget=0)
    assert propose(speculator, {"a": [15], "b": [4], "c": []})[1] == [5, 6, 7]
    assert (speculator.counters["waited_steps"], speculator.counters["skipped_steps"]) == (2, 8)
    schedule(speculator, d=[1, 2] * 15)
    assert propose(speculator, {"d": [1]}) == [[1] * K], "no draft goes beyond max_model_len"


def test_siblings_in_another_replica_are_drafted_from(monkeypatch):
    channel = Channel()
    monkeypatch.setattr("sam.sharing.drafter.Link", lambda address: channel)
    monkeypatch.setattr(Client, "start", lambda self: None)
    monkeypatch.setattr("sam.vllm.v2.followed_requests.INTERVAL_SECONDS", 0.0)
    writer, reader = (SamSpeculator(config(sharing="replicas"), torch.device("cpu")) for _ in range(2))
    for one in (writer, reader):
        one.share("address")
        schedule(one, a=[1, 2, 3])
    propose(writer, {"a": [4, 5, 6, 7]}, budget=0)
    for one in (writer, reader):
        for _ in range(STEPS_UNDER_WAY):  # text leaves while nobody drafts, too
            propose(one, {"a": []}, budget=0)
    for one in (writer, reader):
        one.drafter.client.exchange()
    assert propose(reader, {"a": [4]}) == [[5, 6, 7]]
    assert reader.counters["sharing_received_tokens"] == 4


def test_a_history_is_written_and_read(tmp_path, model):
    lasting = config(scope="history", history_path=str(tmp_path))
    lasting.model_config.model = model.path
    writer = SamSpeculator(lasting, torch.device("cpu"))
    schedule(writer, a=[1, 2, 3])
    propose(writer, {"a": [4, 5, 6, 7]})
    writer.schedule(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids={"a"}, num_scheduled_tokens={}))
    writer.weights_updated()
    until(lambda: writer.counters["history_written_responses"] == 1)
    reader = SamSpeculator(lasting, torch.device("cpu"))
    schedule(reader, b=[1, 2, 3])
    propose(reader, {"b": []})
    until(lambda: reader.counters["history_found_prompts"] == 1)
    assert propose(reader, {"b": [4]}) == [[5, 6, 7]]


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("line", "speculation", "section", "settings"),
    [
        ("speculation=ngram", {"method": "ngram"}, "scheduler_config", {}),
        ("speculation.paths=2", {"paths": 2}, "scheduler_config", {}),
        ("pipeline_parallel_size=2", {}, "parallel_config", {"pipeline_parallel_size": 2}),
        ("scheduler_cls=mine", {"policy": "threshold"}, "scheduler_config", {"scheduler_cls": "mine"}),
        (None, {}, "scheduler_config", {}),
    ],
)
def test_what_is_not_there_yet_is_refused_in_one_line(line, speculation, section, settings):
    wanted = config(**speculation)
    vars(getattr(wanted, section)).update(settings)
    if line is None:
        return engine.check_engine(wanted, SpeculationConfig.from_vllm(wanted))
    with pytest.raises(ValueError, match=line) as refused:
        engine.check_engine(wanted, SpeculationConfig.from_vllm(wanted))
    assert "\n" not in str(refused.value)


def test_an_engine_is_asked_for_the_door_and_the_graphs():
    arguments = engine.engine_arguments(SpeculationConfig())
    assert arguments["speculative_config"] == {
        "method": "ngram_gpu",
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [(1, 8, K), (9, 9, 0)],  # the default: a threshold of 8 requests
    }
