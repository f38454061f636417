"""KV pools: connectors of vLLM's that keep KV cache outside the engines, where other replicas and later steps find it.

Such a pool knows KV by vLLM's block hashes: of tokens, not of the weights that computed it. A weight sync should empty
it, but AscendStoreConnector has no reset, and vLLM cannot empty an engine's own prefix cache either while a connector
still holds blocks that it is saving. So every request bears a salt, which vLLM hashes with its first block and so with
all: KV of other weights, or of another run, has other keys and is never read (docs/scheduling.md).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

# Read in vLLM 0.23.0 and vllm-ascend 0.23.0.post1. All replicas find what one has saved.
SHARED = ("MooncakeStoreConnector", "AscendStoreConnector", "MooncakeConnectorStoreV1", "LMCacheMPConnector")
# Keys with the salt: by block hash, or by tokens and salt (LMCacheMPConnector).
SALTED = (*SHARED, "OffloadingConnector", "SimpleCPUOffloadConnector")
# Keys by token ids alone. LMCacheConnectorV1: https://github.com/LMCache/LMCache/issues/2878
UNSALTED = ("ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1", "LMCacheAscendConnector")
# Hand KV of a request from one engine to another, or keep it for that request: nobody else reads it.
OF_ONE_REQUEST = (
    "NixlConnector",
    "P2pNcclConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MooncakeConnectorV1",
    "MooncakeHybridConnector",
    "MooncakeLayerwiseConnector",
    "ExampleHiddenStatesConnector",
)
OF_SEVERAL = "MultiConnector"
DECLARED = "keyed_by_block_hashes"  # the user's word for a connector that is in none of these
LOOKUP = "lookup_rpc_port"
# Engines of a node ask their worker about keys through a socket that is named after this number alone.
WITH_LOOKUP = ("MooncakeStoreConnector", "AscendStoreConnector", "MooncakeConnectorStoreV1")

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


class Connector(NamedTuple):
    """A connector of a rollout: its name in vLLM, its `kv_connector_extra_config`, and the key that it comes from."""

    name: str
    extra: dict[str, Any]
    key: str

    @property
    def is_salted(self) -> bool | None:
        """Whether its keys bear the salt; None: it is not known."""
        if self.extra.get(DECLARED):
            return True
        if self.name in UNSALTED:
            return False
        return True if self.name in SALTED or self.name in OF_ONE_REQUEST else None


def connectors(config: DictConfig) -> list[Connector]:
    """Those that vLLM is told of; of a MultiConnector its parts."""
    section = OmegaConf.select(config, ENGINE)
    engine = OmegaConf.to_container(section, resolve=True) if section else {}
    if engine.get("kv_offloading_size") is not None:  # sets the connector, whatever else is there
        name = {"lmcache": "LMCacheMPConnector"}.get(engine.get("kv_offloading_backend"), "OffloadingConnector")
        return [Connector(name, {}, f"{ENGINE}.kv_offloading_size")]
    transfer = engine.get("kv_transfer_config") or {}
    transfer = json.loads(transfer) if isinstance(transfer, str) else transfer
    return list(_flat(transfer, f"{ENGINE}.kv_transfer_config"))


def _flat(transfer: Mapping[str, Any], key: str) -> Iterator[Connector]:
    name, extra = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config") or {}
    if name == OF_SEVERAL:
        for one in extra.get("connectors", ()):
            yield from _flat(one, key)
    elif name is not None:
        # Of a module that is named, vLLM takes the class there, not its own of that name.
        module = transfer.get("kv_connector_module_path")
        yield Connector(f"{module}.{name}" if module else name, extra, key)


def is_shared(config: DictConfig) -> bool:
    """Whether a chunk that moves to another replica finds its KV cache in a pool."""
    return any(one.name in SHARED or one.extra.get(DECLARED) for one in connectors(config))


def salted(prompt: Mapping[str, Any], run: str, version: int | None) -> dict[str, Any]:
    """vLLM's prompt of a request with the salt of a run and a version of its weights, and the prompt's own salt.

    Args:
        version: verl's global step of the last weight sync.

    Raises:
        RuntimeError: there was none.

    Example:
        >>> salted({"prompt_token_ids": [1, 2]}, "01000000-2026", 7)["cache_salt"]
        '01000000-2026/7'
    """
    if version is None:
        raise RuntimeError("KV pool: a request came before the first weight sync: its KV cache belongs to no version")
    parts = (run, str(version), *([own] if (own := prompt.get("cache_salt")) else []))
    return {**prompt, "cache_salt": "/".join(parts)}


def separate_lookups(transfer: dict[str, Any], replica: int) -> None:
    """Give a replica's engine a socket of its own, where the user has named none: replicas of a node share a folder."""
    if transfer.get("kv_connector") == OF_SEVERAL:
        for one in transfer.get("kv_connector_extra_config", {}).get("connectors", ()):
            separate_lookups(one, replica)
    elif transfer.get("kv_connector") in WITH_LOOKUP:
        transfer.setdefault("kv_connector_extra_config", {}).setdefault(LOOKUP, replica)
