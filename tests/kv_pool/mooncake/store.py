"""mooncake.store as vLLM's and vllm-ascend's 0.23 connectors call it: keys are files of a folder, values are copied.

All of the connector is theirs, its keys and its copies from and to the engine's blocks. Engines in several processes
share the folder as they would share a pool. Like AscendStore's, its reset clears nothing.
"""

import ctypes
import hashlib
import os
from pathlib import Path

import torch

LOG = "log"  # a line for every value put, got or asked for


class _Done:
    """A CUDA event where every kernel has run when its call returns."""

    record = synchronize = lambda self: None


if not torch.cuda.is_available():
    torch.cuda.Event = _Done


class ReplicateConfig:
    preferred_segment = ""


class MooncakeDistributedStore:
    """Its master's address, the last of the settings, is the folder."""

    def setup(self, *settings, **named) -> int:
        self.folder = Path([*settings, *named.values()][-1])
        self.folder.mkdir(parents=True, exist_ok=True)
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def _file(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()

    def _log(self, event: str, keys: list[str]) -> None:
        with (self.folder / LOG).open("a") as log:
            log.write("".join(f"{event} {key}\n" for key in keys))

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(self._file(key).exists()) for key in keys]

    def batch_put_from_multi_buffers(self, keys, addresses, sizes, config) -> list[int]:
        for key, starts, lengths in zip(keys, addresses, sizes, strict=True):
            part = self._file(key).with_suffix(f".{os.getpid()}")
            part.write_bytes(b"".join(ctypes.string_at(*one) for one in zip(starts, lengths, strict=True)))
            part.rename(self._file(key))
        self._log("put", keys)
        return [sum(lengths) for lengths in sizes]

    def batch_get_into_multi_buffers(self, keys, addresses, sizes) -> list[int]:
        for key, starts, lengths in zip(keys, addresses, sizes, strict=True):
            value, at = self._file(key).read_bytes(), 0
            for start, length in zip(starts, lengths, strict=True):
                ctypes.memmove(start, value[at : at + length], length)
                at += length
        self._log("get", keys)
        return [sum(lengths) for lengths in sizes]

    def remove_all(self, force: bool = False) -> int:
        return 0
