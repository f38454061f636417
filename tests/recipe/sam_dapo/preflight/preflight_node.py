"""A node on which dapo_qwen3_32b would start, made of files and stand-ins: what tests of preflight spoil."""

import copy
import functools
import json
from pathlib import Path

import numpy
import pandas
import pytest
from omegaconf import DictConfig, OmegaConf
from safetensors.numpy import save_file

from recipe.sam_dapo.launch import versions
from recipe.sam_dapo.launch.config import compose_config
from recipe.sam_dapo.preflight import compatibility, machine
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer

# Qwen3-32B's, as its config.json has them.
SIZES = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 25600,
    "tie_word_embeddings": False,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "1 + 1"}]
CHOICES = ("device=", "routing=", "scale=", "speculation=", "training=")

composed = functools.cache(lambda name, *choices: compose_config(name, list(choices)))  # takes a second or more


def config_of(name: str, *overrides: str) -> DictConfig:
    """A config with overrides; it is composed once for each of its choices, and nothing follows from other keys."""
    choices = [one for one in overrides if one.startswith(CHOICES)]
    config = copy.deepcopy(composed(name, *choices))
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist([one.lstrip("+") for one in overrides if one not in choices])
    return config


def with_files(name: str, folder: Path, *overrides: str) -> DictConfig:
    """A config with the files of a folder."""
    own = [f"actor_rollout_ref.model.path={folder}/model"]
    own += [f"data.{split}_files={folder}/{split}.parquet" for split in ("train", "val")]
    return config_of(name, *own, *overrides)


def tiny(folder: Path, *overrides: str) -> DictConfig:
    return with_files("dapo_tiny_cpu", folder, f"assets={folder}", *overrides)


class Node:
    """Its files lie in `folder`; `versions` are those of packages, `free` are GiB."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.set, self.env = folder, monkeypatch.setattr, monkeypatch.setenv
        self.versions = {name: taken for devices, name, taken, _ in compatibility.MACHINE if devices == "npu"}
        self.free = {"disk": 4000.0, "shared": 4000.0, "memory": 1500.0}
        for row in compatibility.MACHINE:
            monkeypatch.delenv(row[1], raising=False)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        (folder / "cann" / "aarch64-linux").mkdir(parents=True)
        (folder / "cann" / "aarch64-linux" / "ascend_toolkit_install.info").write_text("version=9.0.0\n")
        self.env("ASCEND_HOME_PATH", str(folder / "cann"))
        original = versions.installed
        self.set(versions, "installed", lambda name: self.versions.get(name) or original(name))
        self.set(machine, "has_device", lambda device: True)
        places = {machine.SHARED_MEMORY: "shared"}
        self.set(machine, "free_gib", lambda place: self.free[places.get(place, "disk")])
        self.set(machine, "free_memory_gib", lambda: self.free["memory"])

    def config(self, *overrides: str) -> DictConfig:
        return with_files("dapo_qwen3_32b", self.folder, *overrides)


def write_rows(path: Path, **columns) -> None:
    """A row as verl reads it, with other columns in place of its own; None leaves one out."""
    answer = {"style": "rule", "ground_truth": "2"}
    row = {"data_source": ["math_dapo"], "prompt": [MESSAGES], "reward_model": [answer], **columns}
    pandas.DataFrame({name: values for name, values in row.items() if values is not None}).to_parquet(path)


def write_model(folder: Path) -> None:
    """config.json of 32 billion parameters, a small tokenizer, and two shards of a few bytes with their index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    build_tokenizer().save_pretrained(folder)
    places = {f"layer{number}.weight": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    for tensor, shard in places.items():
        save_file({tensor: numpy.zeros((2, 64), numpy.float32)}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
