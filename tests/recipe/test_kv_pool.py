"""KV pools: which connectors of vLLM's key by the salt, and that every request of a server bears it."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest

from recipe import kv_pool
from recipe.launch import environment
from recipe.launch.config import compose_config
from recipe.preflight import checks
from recipe.rollout.router import write_config

KEY = f"+{kv_pool.ENGINE}.kv_transfer_config"
MOONCAKE = "{kv_connector:MooncakeStoreConnector,kv_role:kv_both}"
BLOCK = 4
PROMPT = list(range(18))


def config(*overrides):
    return compose_config("dapo_tiny_cpu", list(overrides))


def request(salt, tokens=PROMPT):
    """vLLM's own, with block hashes."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    parameters = SamplingParams(max_tokens=1)
    return Request("0", list(tokens), parameters, None, cache_salt=salt, block_hasher=hasher)


def mooncake(made):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ChunkedTokenDatabase, KeyMetadata

    keys = ChunkedTokenDatabase(KeyMetadata("model", 0, 0, 0, 0), BLOCK)
    return [key.to_string() for _, _, key in keys.process_tokens(len(PROMPT), made.block_hashes)]


def offloading(made):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    group = SimpleNamespace(hash_block_size_factor=1, group_idx=0)
    keys = SimpleNamespace(offload_keys=[])
    state = SimpleNamespace(req=made, config=SimpleNamespace(kv_group_configs=[group]), group_states=[keys])
    scheduler.RequestOffloadState.update_offload_keys(state)
    return keys.offload_keys


def example(made):
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    folders = []
    connector = ExampleConnector.__new__(ExampleConnector)
    connector._block_size, connector._storage_path = BLOCK, "pool"
    named = connector._generate_foldername_debug
    connector._generate_foldername_debug = lambda *a, **k: folders.append(named(*a, **k)) or "nowhere"
    connector._found_match_for_request(made)
    return folders


def hf3fs(made):
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_connector import HF3FSKVConnector

    connector = HF3FSKVConnector.__new__(HF3FSKVConnector)
    connector._block_size = BLOCK
    return connector._generate_block_hashes(made.prompt_token_ids, 0)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("MooncakeStoreConnector", mooncake),
        ("OffloadingConnector", offloading),
        ("ExampleConnector", example),
        ("HF3FSKVConnector", hf3fs),
    ],
)
def test_vllms_own_keys_bear_the_salt_where_it_is_said(name, keys):
    """By each connector's own code: equal for requests of a version, and for those of two unless it is salted."""
    old, same, new = keys(request("run/1")), keys(request("run/1")), keys(request("run/2"))
    assert old and old == same
    if kv_pool.Connector(name, {}, "").is_salted:
        assert not set(old) & set(new)
    else:
        assert old == new


def test_requests_of_a_version_share_the_prefix():
    other = [*PROMPT[: 2 * BLOCK], *range(100, 110)]
    hashes, others = request("run/1").block_hashes, request("run/1", other).block_hashes
    assert hashes[:2] == others[:2] and not set(hashes[2:]) & set(others)


def test_every_connector_of_vllm_is_looked_at():
    """What a new vLLM brings must be read before it is named salted."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    unknown = {"DecodeBenchConnector", "FlexKVConnectorV1"}  # made-up KV; keys of a package that is not here
    known = {*kv_pool.SALTED, *kv_pool.UNSALTED, *kv_pool.OF_ONE_REQUEST, kv_pool.OF_SEVERAL}
    registered = set(KVConnectorFactory._registry)
    assert registered - known == unknown
    # vllm-ascend's
    assert known - registered == {
        "AscendStoreConnector", "MooncakeConnectorStoreV1", "LMCacheAscendConnector", "MooncakeConnectorV1",
        "MooncakeHybridConnector", "MooncakeLayerwiseConnector",
    }  # fmt: skip


SEVERAL = json.dumps(
    {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheConnectorV1"}]
        },
    }
)


@pytest.mark.parametrize(
    ("overrides", "found", "shared", "code"),
    [
        ((), [], False, None),
        ((f"{KEY}={MOONCAKE}",), ["MooncakeStoreConnector"], True, None),
        ((f"{KEY}={{kv_connector:AscendStoreConnector}}",), ["AscendStoreConnector"], True, None),
        ((f"{KEY}='{SEVERAL}'",), ["NixlConnector", "LMCacheConnectorV1"], False, "pool.unsalted"),
        ((f"{KEY}={{kv_connector:NixlConnector}}",), ["NixlConnector"], False, None),
        ((f"+{kv_pool.ENGINE}.kv_offloading_size=4",), ["OffloadingConnector"], False, None),
        ((f"{KEY}={{kv_connector:ExampleConnector}}",), ["ExampleConnector"], False, "pool.unsalted"),
        ((f"{KEY}={{kv_connector:UCMConnector}}",), ["UCMConnector"], False, "pool.unknown"),
        ((f"{KEY}={{kv_connector:Own,kv_connector_module_path:a.b}}",), ["a.b.Own"], False, "pool.unknown"),
        ((f"{KEY}={{kv_connector:NixlConnector,kv_connector_module_path:a}}",), ["a.NixlConnector"], False,
         "pool.unknown"),
        ((f"{KEY}={{kv_connector:Own,kv_connector_module_path:a.b,kv_connector_extra_config:{{{kv_pool.DECLARED}:true}}}}",),
         ["a.b.Own"], True, None),
        ((f"{KEY}={{kv_connector:AscendStoreConnector,kv_connector_extra_config:{{discard_partial_chunks:false}}}}",),
         ["AscendStoreConnector"], True, "pool.partial"),
    ],
)  # fmt: skip
def test_what_a_config_has_and_what_preflight_says_of_it(overrides, found, shared, code):
    made = config(*overrides)
    assert [one.name for one in kv_pool.connectors(made)] == found
    assert kv_pool.is_shared(made) is shared
    assert [problem.code for problem in checks._kv_pool(made)] == ([code] if code else [])


class Engine:
    """vLLM's AsyncLLM as far as it is asked: it notes what it is to generate."""

    def __init__(self, pool):
        self.vllm_config = SimpleNamespace(kv_transfer_config=pool)
        self.asked = []

    async def generate(self, prompt, sampling_params, request_id, *, priority=0):
        self.asked.append((prompt, request_id, priority))
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason="stop")])


@pytest.fixture
def server(monkeypatch):
    from recipe.rollout import server

    monkeypatch.setattr(server, "job_and_session", lambda: "run")

    def make(pool):
        made = server.SpeculationServer.__new__(server.SpeculationServer)
        made.engine, made.global_steps, made._ended_by_length = Engine(pool), None, set()
        made._wrap_generate()
        return made

    return make


async def _generate(engine, *arguments, **keywords):
    return [output async for output in engine.generate(*arguments, **keywords)]


def generate(server, *arguments, **keywords):
    asyncio.run(_generate(server.engine, *arguments, **keywords))
    return server.engine.asked[-1]


PARAMETERS = SimpleNamespace(extra_args=None)


def test_every_request_bears_the_version_that_the_server_has_when_it_comes(server):
    made = server(pool=SimpleNamespace())
    prompt = {"prompt_token_ids": PROMPT, "multi_modal_data": {}}
    for step in (7, 7, 8):
        asyncio.run(made.set_global_steps(step))
        asked = generate(made, prompt=prompt, sampling_params=PARAMETERS, request_id="a", priority=1)
        assert asked == ({**prompt, "cache_salt": f"run/{step}"}, "a", 1)
    # vLLM's OpenAI endpoints call by position; a salt of the user's stays part of it.
    asked = generate(made, prompt | {"cache_salt": "user"}, PARAMETERS, "b")
    assert asked == ({**prompt, "cache_salt": "run/8/user"}, "b", 0)
    assert "cache_salt" not in prompt


def test_a_request_before_the_first_weight_sync_has_no_version(server):
    with pytest.raises(RuntimeError, match="before the first weight sync"):
        generate(server(pool=SimpleNamespace()), {"prompt_token_ids": PROMPT}, PARAMETERS, "a")


def test_without_a_pool_nothing_changes(server):
    prompt = {"prompt_token_ids": PROMPT}
    assert generate(server(pool=None), prompt=prompt, sampling_params=PARAMETERS, request_id="a")[0] is prompt


def test_replicas_of_a_node_ask_through_sockets_of_their_own():
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "AscendStoreConnector"},
                {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {"lookup_rpc_port": 5}},
                {"kv_connector": "NixlConnector"},
            ]
        },
    }
    kv_pool.separate_lookups(several, 3)
    ports = [one.get("kv_connector_extra_config") for one in several["kv_connector_extra_config"]["connectors"]]
    assert ports == [{"lookup_rpc_port": 3}, {"lookup_rpc_port": 5}, None]


@pytest.mark.parametrize("pool", [(), (f"{KEY}={MOONCAKE}",)])
def test_replicas_hash_alike_where_there_is_a_pool(pool, monkeypatch, tmp_path):
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kept = dict(os.environ)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    try:
        environment.prepare(config(f"run_dir={tmp_path}", *pool), tmp_path)
        assert environment.ray_runtime_env()["env_vars"].get("PYTHONHASHSEED") == ("0" if pool else None)
        first = []
        for _ in range(2):  # as each engine's process does
            kv_cache_utils.init_none_hash(sha256)
            first.append(kv_cache_utils.NONE_HASH)
        assert (first[0] == first[1]) is bool(pool)
    finally:
        os.environ.clear()
        os.environ.update(kept)


@pytest.mark.parametrize("pool", [(), (f"{KEY}={MOONCAKE}",)])
def test_the_router_is_told_of_a_pool(pool, tmp_path):
    import yaml

    write_config(config("routing=context", f"run_dir={tmp_path}", *pool))
    assert yaml.safe_load((tmp_path / "router.yaml").read_text())["pool"] is bool(pool)
