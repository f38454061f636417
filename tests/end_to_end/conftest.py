"""What whole runs share: the tiny model, a user's own parts, and a run with these and without drafts, whose responses
those of all others are to be."""

import shutil
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pandas
import pytest

from recipe.sam_dapo.tiny.assets import AssetSettings, prepare_assets
from recipe.sam_dapo.tiny.warm_start import WarmStartSettings
from tests.end_to_end.runs import own_run

# "two_drafts" asks through the user's agent loop; "tool_agent", verl's, talks with the user's tool.
AGENTS = (
    "tool_agent", "single_turn_agent", "tool_agent", "single_turn_agent", "two_drafts", "tool_agent",
    "single_turn_agent", "single_turn_agent",
)  # fmt: skip


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A model that has learnt next to nothing: every group trains, whatever its answers, where none is filtered out."""
    folder = tmp_path_factory.mktemp("tiny") / "assets"
    prepare_assets(folder, AssetSettings(train_rows=64, val_rows=4, warm_start=replace(WarmStartSettings(), steps=40)))
    return folder


@pytest.fixture(scope="session")
def own(assets, tmp_path_factory):
    """The folder in which runs start, with what a user brings."""
    folder = shutil.copytree(Path(__file__).with_name("own"), tmp_path_factory.mktemp("runs") / "own")
    train = pandas.read_parquet(assets / "train.parquet").head(len(AGENTS)).assign(data_source="own", agent_name=AGENTS)
    train["extra_info"] = [{"index": str(uuid4())} for _ in AGENTS]
    train["reward_model"] = [{"style": "rule", "ground_truth": str(number)} for number in range(len(AGENTS))]
    train.to_parquet(folder / "own.parquet")
    # As AIME-2024 is published: a problem many times over, each time with its one index.
    single = train.assign(agent_name="single_turn_agent")
    pandas.concat([single[1:3]] * 4).to_parquet(folder / "repeated.parquet")
    verls = train.assign(agent_name=train.agent_name.replace("two_drafts", "single_turn_agent"))
    verls.to_parquet(folder / "verls.parquet")  # for scripts of verl's, which are not told of the user's agent loop
    return folder


@pytest.fixture(scope="session")
def off(own, assets):
    """verl's balancer, no drafts: the run, and what its screen said."""
    return own_run(own, assets, "off", "routing=verl", "speculation=off")
