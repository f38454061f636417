"""Blocks of key-value cache in which rows of further paths write, beyond those that vLLM's scheduler gives out."""

import logging
from dataclasses import replace

import torch

from sam.vllm import patches

logger = logging.getLogger(__name__)


class ExtraBlocks:
    """Makes room for the blocks, and copies between blocks in all layers.

    Args:
        runner: vLLM's model runner; its `initialize_kv_cache` is wrapped, so this has to come before it is called.
        rows: that need blocks at once.
        tokens: of a row.

    Attributes:
        block_size: tokens of a block.
        of_row: int [rows, n], numbers of each row's blocks.
    """

    def __init__(self, runner, rows: int, tokens: int):
        self._runner, self._rows, self._tokens = runner, rows, tokens
        self.block_size, self.of_row = 0, []
        self._num_blocks = 0  # vLLM's and these
        patches.wrap(runner, "initialize_kv_cache", "add_path_blocks", self._with_room)

    def _with_room(self, initialize, kv_cache_config, *arguments, **keywords):
        return initialize(self._enlarged(kv_cache_config), *arguments, **keywords)

    def _enlarged(self, config):
        """vLLM's KVCacheConfig with more blocks, of which the scheduler does not know.

        Raises:
            ValueError: a cache whose blocks cannot be copied for a row.
        """
        check_cache(config)
        self.block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
        each = -(-self._tokens // self.block_size) + 1  # they may begin anywhere in a block
        self._num_blocks = config.num_blocks + self._rows * each
        first = range(config.num_blocks, self._num_blocks, each)
        self.of_row = [list(range(start, start + each)) for start in first]
        tensors = [
            replace(one, size=one.size // config.num_blocks * self._num_blocks) for one in config.kv_cache_tensors
        ]
        more = sum(new.size - old.size for new, old in zip(tensors, config.kv_cache_tensors, strict=True))
        logger.info("further paths: %d blocks of KV cache beside vLLM's, %.0f MiB", self._rows * each, more / 2**20)
        return replace(config, num_blocks=self._num_blocks, kv_cache_tensors=tensors)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks, in all layers.

        Args:
            source, target: int64 [n], numbers of blocks on the cache's device; no target twice.
        """
        if not len(target):
            return
        for cache in _tensors(self._runner.kv_caches):
            # Attention kernels may have smaller blocks than the scheduler, and layouts of their own.
            dimension = next(d for d, size in enumerate(cache.shape) if size and size % self._num_blocks == 0)
            parts = cache.shape[dimension] // self._num_blocks
            cache.index_copy_(dimension, _split(target, parts), cache.index_select(dimension, _split(source, parts)))


def _tensors(caches):
    for cache in caches:
        yield from cache if isinstance(cache, list | tuple) else [cache]


def _split(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    """Each block's parts, where kernels see several."""
    return (blocks[:, None] * parts + torch.arange(parts, device=blocks.device)).ravel() if parts > 1 else blocks


def check_cache(config) -> None:
    """Raise ValueError unless one group of full attention layers is all that the KV cache has."""
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if len(kinds) != 1 or kinds[0] not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ValueError(
            f"speculation.paths: this model's KV cache is of {', '.join(kinds) or 'no kind'}, rows of further paths "
            "need one of full attention only: set speculation.paths=1"
        )
