"""Keys of the real AscendStoreConnector on the simulated NPU: prints them as JSON. `python pool_keys.py`"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", PYTHONHASHSEED="0")

import simulator

simulator.install()

from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store import config_data, pool_scheduler  # noqa: E402
from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.ascend_store_connector import (  # noqa: E402
    AscendStoreConnector,
)

BLOCK, PROMPT = 4, 18


def request(salt: str) -> Request:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    parameters = SamplingParams(max_tokens=64)
    return Request("0", list(range(PROMPT)), parameters, None, cache_salt=salt, block_hasher=hasher)


def stored(made: Request, tokens: int, discard: bool = True) -> list[tuple[str, int]]:
    """Keys under which the worker would save, and tokens of each, when the scheduler has counted so many tokens."""
    tracker = config_data.RequestTracker("0", tokens, allocated_block_ids=list(range(1, 20)), num_prompt_tokens=PROMPT)
    meta = config_data.ReqMeta.from_request_tracker(
        tracker, BLOCK, block_hashes=made.block_hashes, discard_partial_chunks=discard, original_block_size=[BLOCK]
    )
    keys = config_data.ChunkedTokenDatabase([config_data.KeyMetadata("model", 0, 0, 0, 0)], [BLOCK], None)
    found = keys.process_token_key_strings_with_block_ids(meta.save_end_token, meta.block_hashes, meta.block_ids)
    return [(key, end - start) for start, end, key, _, _ in found]


def asked(made: Request) -> list[str]:
    """Keys that the scheduler looks up."""
    scheduler = SimpleNamespace(
        tp_size=1, put_step=1, pp_size=1, pp_rank=0, pcp_size=1, dcp_size=1, model_name="model",
        kv_cache_group_families=["default"], num_layers=1, _get_group_family=lambda families, group: families[group],
    )  # fmt: skip
    keys = pool_scheduler.KVPoolScheduler._generate_store_query_keys(scheduler, made.block_hashes)
    return [key for block in keys for key in block]


kv_cache_utils.init_none_hash(sha256)
salts = {name: request(name) for name in ("run/1", "run/2")}
written = request("run/1")
before = stored(written, PROMPT + 1)
written.append_output_token_ids([7, 8])  # 20 tokens are known; a step's eight draft tokens are not
json.dump(
    {
        "keys": {name: [key for key, _ in stored(made, PROMPT)] for name, made in salts.items()},
        "again": [key for key, _ in stored(request("run/1"), PROMPT)],
        "asked": {name: asked(made) for name, made in salts.items()},
        "known": before,
        "drafted": stored(written, PROMPT + 2 + 8),
        "partial": stored(request("run/1"), 6, discard=False),
        "resets": AscendStoreConnector.reset_cache is not KVConnectorBase_V1.reset_cache,
    },
    sys.stdout,
)
