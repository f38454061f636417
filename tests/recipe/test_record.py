"""What runs and builds leave on disk: metrics, settings, built folders."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from sam.record.engine_steps import EngineSteps
from sam_recipe.launch.config import compose_config
from sam_recipe.record import Contents, RunRecord, build_once, changes, keep, read_json, read_metrics, rollout_metrics


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


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    keep(directory, compose_config("dapo_tiny_cpu", []), None)
    return directory


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


@pytest.mark.parametrize(
    ("said", "more", "makes_another_curve"),
    [
        (CURVE, [], True),
        (OTHERS, ["speculation=off"], False),
        (("trainer.total_training_steps 10 -> 20",), [f"{OPTIM}.lr_scheduler_type=cosine"], True),  # its end bends it
        ((), [], False),
    ],
)
def test_settings_that_make_another_curve_are_listed_apart(before, said, more, makes_another_curve):
    overrides = [f"{one.split(' ')[0]}={one.split(' -> ')[1]}" for one in said]
    curve, others = changes(before, compose_config("dapo_tiny_cpu", [*more, *overrides]))
    assert set(said) <= set(curve if makes_another_curve else others) and (makes_another_curve or not curve)
    assert said or not others


def test_a_config_that_cannot_be_read_is_one_line(tmp_path):
    now = compose_config("dapo_tiny_cpu", [])
    for content in (None, "a: [", "- a"):
        if content is not None:
            (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="config.yaml cannot be read .*: what settings the run had is not known"):
            changes(tmp_path, now)


def test_the_old_config_is_kept(tmp_path):
    configs = [OmegaConf.create({"seed": seed}) for seed in range(3)]
    for until, config in ((None, configs[0]), (3, configs[0]), (3, configs[1]), (3, configs[2])):
        keep(tmp_path, config, until)
    kept = {path.name: OmegaConf.load(path).seed for path in tmp_path.iterdir()}
    assert kept == {"config.yaml": 2, "config.until_step_3.yaml": 0, "config.until_step_3.2.yaml": 1}


def engine(milliseconds=(10.0, 10.0, 30.0, 50.0), pauses=(0.0, 0.0, 0.0, 0.0), **more):
    """A replica's steps; `pauses` are seconds without work before each of them."""
    return EngineSteps(
        end_s=1000.0 + np.cumsum(np.array(milliseconds) / 1e3 + np.array(pauses)), step_ms=milliseconds,
        running=[4, 4, 2, 1], drafted=[0, 0, 6, 3], accepted=[0, 0, 2, 1], emitted=[4, 4, 4, 2],
        position_steps=[2, 1], position_emitted=[4, 2], drafted_at=[3, 3, 3], accepted_at=[2, 1, 0],
        replayed=[True, False, True, True], draft_model_drafted_tokens=10, draft_model_accepted_tokens=5,
        counters={"draft_errors": 0, "tracked_requests": 4}, **{"has_graphs": True, **more},
    )  # fmt: skip


PLAIN = EngineSteps(step_ms=[1.0], drafted_at=[0] * 3, accepted_at=[0] * 3, asynchronous=True, replayed=[True])


def metrics_of(*replicas, seconds=(0.1,), rounds=1):
    found = rollout_metrics(list(replicas), list(seconds), 2, rounds)
    return {name.removeprefix("rollout/"): value for name, value in found.items()}


def test_metrics_add_up_over_the_replicas_that_record_them():
    metrics = metrics_of(engine(), PLAIN, engine())
    expected = {
        "tokens": 28, "spec_accept_rate": 6 / 18, "spec_accept_length": 2.0, "spec_accept_rate/position_2": 1 / 3,
        "spec_draft_model_tokens": 20, "spec_draft_model_accept_rate": 0.5, "asynchronous_scheduling": 0.0,
        "drafter/draft_errors": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "drafter/tracked_requests" not in metrics, "nobody acts on it"
    alone = metrics_of(PLAIN)
    assert alone["asynchronous_scheduling"] == 1.0 and not any("draft_model" in name for name in alone)
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


def test_generation_rounds_are_told_apart_by_the_pauses_between_them():
    first = engine(pauses=(0.0, 0.002, 1.5, 0.0))  # 2 ms is within a round
    second = engine(pauses=(0.0, 0.0, 0.0, 2.0))
    found = metrics_of(first, second, seconds=(0.2, 0.4), rounds=2)
    rounds = {name: value for name, value in found.items() if name.startswith("round_seconds")}
    # Of the slower replica: 10, 10 and 30 ms, then 80.
    expected = {"1": 0.05, "2": 0.08, "replica_mean": 0.15}
    assert rounds == pytest.approx({f"round_seconds/{name}": value for name, value in expected.items()})
    metrics = metrics_of(engine(), rounds=2)  # of a replica without a part in every round
    assert "round_seconds/1" not in metrics and metrics["round_seconds/replica_mean"] == pytest.approx(0.05)


def test_a_folder_is_built_once_for_its_settings_sources_and_versions(tmp_path):
    (source := tmp_path / "source.py").write_text("a")
    contents, folder = Contents("things", {"seed": 0}, [source], ["numpy"]), tmp_path / "built" / "things"
    arrived, results = threading.Barrier(2), []

    def call():
        arrived.wait()
        results.append(build_once(folder, contents, lambda output: (output / "thing").write_text("first")))

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [False, True], "of two at once one builds"
    assert not build_once(folder, contents, lambda output: pytest.fail("built again"))

    def fail(output):
        (output / "thing").write_text("half")
        raise KeyboardInterrupt

    anew = replace(contents, settings={"seed": 1}), replace(contents, packages=()), replace(contents, sources=[])
    for other in anew:
        with pytest.raises(KeyboardInterrupt):
            build_once(folder, other, fail)
    assert (folder / "thing").read_text() == "first", "a failed build changes nothing"
    source.write_text("b")
    assert build_once(folder, contents, lambda output: (output / "thing").write_text("second"))
    assert (folder / "thing").read_text() == "second" and len(list(folder.parent.iterdir())) == 2, "and the lock"
    (folder / "assets.json").unlink()
    with pytest.raises(ValueError, match="holds something else than things"):
        build_once(folder, contents, fail)
    assert (folder / "thing").read_text() == "second"
