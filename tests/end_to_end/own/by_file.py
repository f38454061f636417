"""verl has no checkpoint engine for a machine without devices: this one sends weights through a file."""

import asyncio
import tempfile
from pathlib import Path

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class ByFile(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False):
        pass

    def prepare(self):
        return tempfile.mkdtemp()

    @classmethod
    def build_topology(cls, actors, rollouts, folders):
        return {"folder": folders[:1] * actors}, {"folder": folders[:1] * rollouts}

    def init_process_group(self, folder):
        self.folder = Path(folder)

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        torch.save({name: tensor.clone() for name, tensor in weights}, self.folder / "part")
        (self.folder / "part").rename(self.folder / "weights")

    async def receive_weights(self, global_steps=None):
        while not (self.folder / "weights").exists():
            await asyncio.sleep(0.01)
        for pair in torch.load(self.folder / "weights").items():
            yield pair
