"""What runs and builds leave on disk: metrics, settings, built folders."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from sam.record.engine_steps import EngineSteps
from sam_recipe.launch.config import compose_config
from sam_recipe.record import RunRecord, build_once, changes, keep, read_json, read_metrics, rollout_metrics


def test_a_line_written_by_halves_is_passed_over_and_gone_after_a_resume(tmp_path):
    record = RunRecord(tmp_path)
    for step in (1, 2):
        record.append_metrics(step, {"a": np.float32(step), "flag": True, "text": "x"})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "a')
    assert read_metrics(tmp_path) == {1: {"a": 1.0}, 2: {"a": 2.0}} and read_metrics(tmp_path / "none") == {}
    record.start(first_step=2)
    record.append_metrics(2, {"a": 5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 5.0}\n'
    for content in ('{"pid": 1', "[1]", None):
        (file := tmp_path / "one.json").write_text(content) if content else file.unlink()
        assert read_json(file) == {}, "what is missing or damaged holds nothing"


OPTIM, ROLLOUT = "actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout"
CURVE = (
    f"{OPTIM}.lr 0.0002 -> 0.001", "seed 0 -> 7", "data.train_batch_size 8 -> 4",
    "data.train_files outputs/tiny_assets/train.parquet -> /elsewhere", f"{ROLLOUT}.temperature 1.0 -> 0.7",
    "speculation.verification exact -> rejection", "algorithm.filter_groups.enable True -> False",
)  # fmt: skip
OTHERS = (
    "trainer.save_freq 5 -> 1", "trainer.total_training_steps 10 -> 20", f"{ROLLOUT}.max_num_seqs 128 -> 64",
    "trainer.logger ['console', 'wandb'] -> ['console']",
)  # fmt: skip


@pytest.mark.parametrize(("said", "more"), [(CURVE, []), (OTHERS, ["speculation=off"]), ((), [])])
def test_settings_that_make_another_curve_are_listed_apart(tmp_path, said, more):
    keep(tmp_path, compose_config("dapo_tiny_cpu", []), None)
    overrides = [f"{one.split(' ')[0]}={one.split(' -> ')[1]}" for one in said]
    curve, others = changes(tmp_path, compose_config("dapo_tiny_cpu", [*more, *overrides]))
    assert set(said) <= set(curve if said is CURVE else others) and (said is CURVE or not curve)
    assert said or not others


def test_the_old_config_is_kept_and_one_that_cannot_be_read_is_one_line(tmp_path):
    for until, seed in ((None, 0), (3, 0), (3, 1), (3, 2)):
        keep(tmp_path, OmegaConf.create({"seed": seed}), until)
    kept = {path.name: OmegaConf.load(path).seed for path in tmp_path.iterdir()}
    assert kept == {"config.yaml": 2, "config.until_step_3.yaml": 0}, "the first one's, which has trained until there"
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml cannot be read .*: what settings the run had is not known"):
        changes(tmp_path, compose_config("dapo_tiny_cpu", []))


def engine(milliseconds=(10.0, 10.0, 30.0, 50.0), **more):
    """A replica's steps."""
    return EngineSteps(
        step_ms=milliseconds,
        running=[4, 4, 2, 1], drafted=[0, 0, 6, 3], accepted=[0, 0, 2, 1], emitted=[4, 4, 4, 2],
        drafted_at=[3, 3, 3], accepted_at=[2, 1, 0],
        replayed=[True, False, True, True],
        counters={"draft_errors": 0, "tracked_requests": 4},
        **{"has_graphs": True, "turn_steps": [3, 0, 0, 0], "turn_emitted": [6, 0, 0, 0], **more},
    )  # fmt: skip


PLAIN = EngineSteps(step_ms=[1.0], drafted_at=[0] * 3, accepted_at=[0] * 3, asynchronous=True, replayed=[True])


def metrics_of(*replicas):
    found = rollout_metrics(list(replicas), [0.1], 2)
    return {name.removeprefix("rollout/"): value for name, value in found.items()}


def test_metrics_add_up_over_the_replicas_that_record_them():
    metrics = metrics_of(engine(), PLAIN, engine())
    expected = {
        "tokens": 28, "spec_accept_rate": 6 / 18, "spec_accept_length": 2.0, "spec_accept_rate/position_2": 1 / 3,
        "asynchronous_scheduling": 0.0,
        "drafter/draft_errors": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "drafter/tracked_requests" not in metrics, "nobody acts on it"
    alone = metrics_of(PLAIN)
    assert alone["asynchronous_scheduling"] == 1.0
    alone = metrics_of(engine())
    assert alone["other_ms_per_step"] == alone["step_ms_per_step"] == 25.0
    metrics = metrics_of(engine(milliseconds=(10.0, 10.0, 10.0, 10.0)), engine())
    assert metrics["tail_seconds"] == pytest.approx((0.02 + 0.08) / 2), "the mean of the replicas"
    assert metrics["tail_share"] == pytest.approx((20 + 80) / (40 + 100)), "of their time"


def turns(last):
    return engine(turn_steps=[4, 2, 0, last], turn_emitted=[8, 6, 0, last])


WITH, WITHOUT = "with_drafts", "without_drafts"


@pytest.mark.parametrize(
    ("part", "replicas", "expected"),
    [
        # Acceptance by turn, where a conversation has several.
        ("spec_accept_length", (turns(0), PLAIN, turns(1)), {"turn_1": 2.0, "turn_2": 3.0, "turn_4": 1.0}),
        ("spec_accept_length", (engine(turn_steps=[4, 0, 0, 0], turn_emitted=[8, 0, 0, 0]),), {}),
        # Steps that replayed a graph, by phase.
        ("graph_share", (engine(), engine()), {WITH: 1.0, WITHOUT: 0.5}),
        ("graph_share", (engine(), engine(has_graphs=False)), {}),
        ("graph_share", (replace(PLAIN, has_graphs=True),), {WITHOUT: 1.0}),
    ],
)
def test_metrics_by_turn_and_by_phase(part, replicas, expected):
    found = {name: value for name, value in metrics_of(*replicas).items() if name.startswith(f"{part}/")}
    assert found == {f"{part}/{name}": value for name, value in expected.items()}


def test_a_folder_is_built_once_for_its_settings_sources_and_versions(tmp_path):
    (source := tmp_path / "source.py").write_text("a")
    folder, settings, made_of = tmp_path / "built" / "things", {"seed": 0}, (source, "numpy")

    def make(content, settings=settings, made_of=made_of):
        return build_once(folder, "things", settings, made_of, lambda new: (new / "thing").write_text(content))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(make, ("first", "first"))) == [False, True], "of two at once one builds"
    assert not make("again") and (folder / "thing").read_text() == "first"

    def fail(output):
        (output / "thing").write_text("half")
        raise KeyboardInterrupt

    for other in (({"seed": 1}, made_of), (settings, (source,)), (settings, ("numpy",))):
        with pytest.raises(KeyboardInterrupt):
            build_once(folder, "things", *other, fail)
    assert (folder / "thing").read_text() == "first", "a failed build changes nothing"
    source.write_text("b")
    assert make("second")
    assert (folder / "thing").read_text() == "second" and len(list(folder.parent.iterdir())) == 2, "and the lock"
    (folder / "assets.json").unlink()
    with pytest.raises(ValueError, match="holds something else than things"):
        make("third")
