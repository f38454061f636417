"""Rows of further paths: which are planned, which fit into a step, and what the model runner is given."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from sam.drafting.drafter import Drafter
from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.vllm.paths import rows
from tests.sam.stepping import step

BLOCK, BLOCKS = 4, 20
REPEATED = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8, 1, 2]
TEXT = [5, 6, 7, 5, 6, 8, 5, 6]  # the last token is not computed


def state(text=TEXT, **parameters):
    return SimpleNamespace(
        sampling_params=SamplingParams(seed=3, extra_args={"sam_waiting": 7}, **parameters), prompt_token_ids=text[:2],
        mm_features=[], num_tokens=len(text), output_token_ids=text[2:], block_ids=([3, 9, 11],), lora_request=None,
    )  # fmt: skip


class Runner:
    """What rows read of vLLM's model runner: one KV cache of one layer, whose blocks hold their own numbers."""

    def __init__(self, **requests):
        self.requests, self.device = requests, torch.device("cpu")
        parallel = SimpleNamespace(tensor_parallel_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.max_num_tokens, self.max_num_reqs = 64, 8
        tokens = np.zeros((8, 32), np.int32)
        for row, one in enumerate(requests.values()):
            tokens[row, : len(TEXT)] = (one.prompt_token_ids + one.output_token_ids)[: len(TEXT)]
        place = {name: row for row, name in enumerate(requests)}
        self.input_batch = SimpleNamespace(token_ids_cpu=tokens, req_id_to_index=place, req_ids=list(requests))
        self.input_batch.num_tokens_no_spec = np.full(8, len(TEXT))
        self.given = None

    def initialize_kv_cache(self, config):
        self.given = config
        self.kv_caches = [torch.arange(config.num_blocks)[:, None].repeat(1, BLOCK)]


def cache_config(*kinds):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec) for _ in kinds or ("full",)]
    return KVCacheConfig(BLOCKS, [KVCacheTensor(BLOCKS * spec.page_size_bytes, ["layer"])], groups)


def path_rows(**requests):
    runner, counters = Runner(**(requests or {"a": state()})), {}
    made = rows.PathRows(runner, Drafter(max_draft_tokens=3), 4, 3, False, counters)
    runner.initialize_kv_cache(cache_config())
    return made, runner, counters


def scheduled(drafts, computed=7, resumed=()):
    counts = {name: 1 + len(draft) for name, draft in drafts.items()}
    cached = SimpleNamespace(
        req_ids=list(drafts), num_computed_tokens=[computed] * len(drafts), resumed_req_ids=set(resumed)
    )
    return SimpleNamespace(
        scheduled_spec_decode_tokens=dict(drafts), num_scheduled_tokens=counts, scheduled_cached_reqs=cached,
        total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(), scheduled_new_reqs=[],
    )  # fmt: skip


def test_a_row_is_a_request_with_the_text_the_blocks_and_the_path():
    made, runner, counters = path_rows()
    made.planned = {"a": [[8, 5, 6]]}
    step = scheduled({"a": [7, 5, 6]})
    made.before_step(step)
    (new,) = step.scheduled_new_reqs
    assert new.prompt_token_ids.tolist() == TEXT and new.num_computed_tokens == len(TEXT) - 1
    # Seven tokens computed: block 9 is shared in part, and copied; the path ends in the block behind it.
    assert new.block_ids == ([3, BLOCKS, BLOCKS + 1],)
    assert runner.kv_caches[0][[BLOCKS, BLOCKS + 1], 0].tolist() == [9, BLOCKS + 1]
    assert new.sampling_params.extra_args is None
    assert runner.requests["a"].sampling_params.extra_args == {"sam_waiting": 7}
    assert step.scheduled_spec_decode_tokens[new.req_id] == [8, 5, 6]
    assert step.num_scheduled_tokens[new.req_id] == 4 and step.total_num_scheduled_tokens == 8
    assert made.owner_of(new.req_id) == made.owner_of("a") == "a"
    assert (made.num_tokens, made.num_draft_tokens, counters["path_rows"], counters["path_tokens"]) == (4, 3, 1, 3)

    after = scheduled({"a": [7]})
    made.before_step(after)
    assert after.finished_req_ids == {new.req_id} and not made.rows and not after.scheduled_new_reqs


@pytest.mark.parametrize(
    ("requests", "step", "change"),
    [
        ({"a": state()}, scheduled({"a": [8, 5, 6]}), None),
        ({"a": state()}, scheduled({"b": [7, 5, 6]}), None),
        ({"a": state()}, scheduled({"a": [7, 5, 6]}, computed=5), None),
        ({"a": state()}, scheduled({"a": [7, 5, 6]}, resumed=["a"]), None),
        ({"a": state(repetition_penalty=1.1)}, scheduled({"a": [7, 5, 6]}), None),
        ({"a": state(min_tokens=3)}, scheduled({"a": [7, 5, 6]}), None),
        ({"a": state()}, scheduled({"a": [7, 5, 6]}), {"max_num_tokens": 7}),
        ({"a": state()}, scheduled({"a": [7, 5, 6]}), {"max_num_reqs": 1}),
        ({"a": state()}, scheduled({}), None),
    ],
    ids=["the draft itself", "no draft", "text unknown", "resumed", "penalties", "min_tokens", "tokens", "rows", "off"],
)
def test_rows_that_cannot_be_are_left_out(requests, step, change):
    made, runner, _ = path_rows(**requests)
    vars(runner).update(change or {})
    made.planned = {"a": [[8, 5, 6]]}
    before = (dict(step.num_scheduled_tokens), step.total_num_scheduled_tokens)
    made.before_step(step)
    assert not made.rows and not step.scheduled_new_reqs and not made.planned
    assert (step.num_scheduled_tokens, step.total_num_scheduled_tokens) == before


def test_a_path_is_cut_to_the_draft_that_the_scheduler_made_room_for():
    made, _, _ = path_rows()
    made.planned = {"a": [[8, 5, 6], [7, 9, 1]]}
    made.before_step(scheduled({"a": [7]}))
    assert [row.tokens for row in made.rows.values()] == [[8]]


def test_the_cache_has_room_for_all_rows_and_vllm_is_told_of_none():
    made, runner, _ = path_rows()
    config = cache_config()
    each = made._own_blocks
    assert len(each) == rows.MOST_ROWS and sum(each, []) == list(range(BLOCKS, runner.given.num_blocks))
    assert runner.given.kv_cache_tensors[0].size * BLOCKS == config.kv_cache_tensors[0].size * runner.given.num_blocks
    assert config.num_blocks == BLOCKS


def test_kernels_with_smaller_blocks_and_other_layouts():
    made, runner, _ = path_rows()
    total = runner.given.num_blocks
    keys = torch.arange(2 * total * 2).reshape(2, 2 * total, 1).clone()  # [keys and values, half blocks, tokens]
    runner.kv_caches = [(keys,)]
    made._copy(torch.tensor([3]), torch.tensor([5]))
    assert keys[:, 10:12].tolist() == keys[:, 6:8].tolist() and keys[0, 12, 0] == 12


def test_a_cache_of_several_groups_is_refused():
    with pytest.raises(ValueError, match=r"full attention only: set speculation.paths=1"):
        rows.check_cache(cache_config("full", "sliding"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_engines_without_such_rows_are_refused_in_one_line(settings, said):
    parallel = SimpleNamespace(**{"tensor_parallel_size": 1, "distributed_executor_backend": "mp"} | settings)
    model = SimpleNamespace(enable_return_routed_experts=settings.get("enable_return_routed_experts", False))
    config = SimpleNamespace(
        parallel_config=parallel, model_config=model, kv_transfer_config=settings.get("kv_transfer_config")
    )
    with pytest.raises(ValueError, match=said) as error:
        rows.check_engine(config)
    assert "set speculation.paths=1" in str(error.value) and "\n" not in str(error.value)


def planner(text=REPEATED, is_uniform=False, **parameters):
    """Rows of a drafter that has drafted for one request, and its draft."""
    drafter = Drafter(max_draft_tokens=3)
    drafter.start("a", np.array(text[:-1], np.int32))
    proposed = step(drafter, ["a"], np.array(text[-1:], np.int32), np.array([0, 1]), np.array([3]))
    made = rows.PathRows(Runner(a=state(text, **parameters)), drafter, 4, 3, is_uniform, {})
    return made, proposed.token_ids.tolist()


def plan(made, draft, longest=3):
    (given,) = made.plan(make_policy("always", 3, 0), StepState(1), ["a"], [draft], np.array([longest]))
    return given


def test_the_longest_path_is_given_to_vllm_and_the_others_become_rows():
    made, draft = planner()
    given = plan(made, draft[:1])
    assert len(given) == 3 and draft[:1] in made.planned["a"]
    assert all(len(path) <= 3 for path in made.planned["a"])
    assert {3, 5, 7} <= {path[0] for path in [given, *made.planned["a"]]}


@pytest.mark.parametrize("drafted, parameters", [(0, {}), (3, {"min_tokens": 3})])
def test_requests_without_a_draft_or_that_may_have_no_rows_get_none(drafted, parameters):
    """Else goodput would expect tokens of rows that nobody verifies."""
    made, draft = planner(**parameters)
    assert plan(made, draft[:drafted]) == draft[:drafted] and not made.planned


def test_no_more_rows_are_planned_than_have_blocks(monkeypatch):
    monkeypatch.setattr(rows, "MOST_ROWS", 1)
    made, draft = planner()
    plan(made, draft)
    assert len(made.planned["a"]) == 1


@pytest.mark.parametrize("came, wins", [([8, 5, 9], 1), ([7, 9], 0), ([9], 0)])
def test_a_request_that_went_on_along_a_further_path_is_counted(came, wins):
    made, runner, counters = path_rows()
    made.planned = {"a": [[8, 5, 6]]}
    made.before_step(scheduled({"a": [7, 5, 6]}))
    runner.input_batch.token_ids_cpu[0, len(TEXT) : len(TEXT) + len(came)] = came
    runner.input_batch.num_tokens_no_spec[0] = len(TEXT) + len(came)
    made.before_step(scheduled({}))
    assert counters["path_wins"] == wins
