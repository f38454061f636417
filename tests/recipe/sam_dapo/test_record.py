"""What runs and builds leave on disk: metrics, settings, built folders."""

import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from omegaconf import OmegaConf

from recipe.sam_dapo.assets import build_once
from recipe.sam_dapo.record import RunRecord, read_metrics
from recipe.sam_dapo.record.metrics import rollout_metrics
from recipe.sam_dapo.record.settings import changes, keep
from sam.record.engine_steps import EngineSteps
from tests.recipe.sam_dapo.preflight.preflight_node import config_of


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


def killed_while_writing(directory, limit, act):
    """Have another process act, which the kernel kills at the first byte that it writes to a file beyond `limit`."""
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        act(directory)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGXFSZ


ROWS = [{"prompt": 0, "response_tokens": [1] * 40}]
ACTS = {
    "a config that goes on": lambda directory: keep(directory, OmegaConf.create({"seed": 1, "name": "x" * 60}), 3),
    "responses": lambda directory: RunRecord(directory).write_rollouts(1, ROWS),
    "a validation": lambda directory: RunRecord(directory).write_validation(1, ROWS),
    "engine steps": lambda directory: engine().save(directory, 1),
    "a phase": lambda directory: RunRecord(directory).enter("update" * 10),
    "the metrics of a run that goes on": lambda directory: RunRecord(directory).start(first_step=3),
    "a step's metrics": lambda directory: RunRecord(directory).append_metrics(3, {"a": 3.0, "b" * 90: 4.0}),
}


@pytest.mark.parametrize("limit", [0, 40, 90])
@pytest.mark.parametrize("name", ACTS)
def test_a_kill_while_a_file_is_written_leaves_each_as_it_was(tmp_path, name, limit):
    keep(tmp_path, OmegaConf.create({"seed": 0, "name": "y" * 200}), None)
    record = RunRecord(tmp_path)
    record.enter("rollout")
    for step in (1, 2, 3):
        record.append_metrics(step, {"a": step, "c" * 40: 1.0})
    record.write_rollouts(1, [])
    record.write_validation(1, [])
    PLAIN.save(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rows = read_metrics(tmp_path)
    if name == "a step's metrics":
        limit += len(before[tmp_path / "metrics.jsonl"])
    assert killed_while_writing(tmp_path, limit, ACTS[name])
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".partial"}
    cut = tmp_path / "metrics.jsonl"
    assert read_metrics(tmp_path) == rows and after.pop(cut).startswith(before.pop(cut))
    assert after == before
    assert not killed_while_writing(tmp_path, 1 << 20, ACTS[name]), "the next time it is written"


OPTIM, ROLLOUT = "actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout"
CURVE = (
    f"{OPTIM}.lr=0.001", "seed=7", "data.train_batch_size=4", "data.train_files=/elsewhere",
    f"{ROLLOUT}.temperature=0.7", "speculation.verification=rejection", "algorithm.filter_groups.enable=false",
)  # fmt: skip
OTHERS = (
    "trainer.save_freq=1", "trainer.total_training_steps=20", f"{ROLLOUT}.max_num_seqs=64", "trainer.logger=[console]",
    "speculation.method=off",
)  # fmt: skip


def test_settings_that_make_another_curve_are_listed_apart_and_the_old_ones_kept(tmp_path):
    """tests/recipe/sam_dapo/test_main_dapo.py has what is said of them."""
    keep(tmp_path, config_of("dapo_tiny_cpu"), None)

    def changed(overrides):
        found = changes(tmp_path, config_of("dapo_tiny_cpu", *overrides))
        return [{one.split(" ")[0] for one in lines} for lines in found]

    assert changed([]) == [set(), set()]
    made_by_0_2_0 = (tmp_path / "config.yaml").read_text().replace("recipe.sam_dapo.", "sam_recipe.")
    assert made_by_0_2_0.count("sam_recipe.") > 3
    (tmp_path / "config.yaml").write_text(made_by_0_2_0)
    assert changed([]) == [set(), set()], "the recipe's package had another name then"
    for overrides, place in ((CURVE, 0), (OTHERS, 1)):
        found = changed(overrides)
        assert {one.partition("=")[0] for one in overrides} <= found[place]
    assert found[0] == set()
    for seed in (1, 2):
        keep(tmp_path, OmegaConf.create({"seed": seed}), 3)
    assert OmegaConf.load(tmp_path / "config.until_step_3.yaml").seed == 0, "which has trained until there"
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml cannot be read .*: what settings the run had is not known"):
        changed([])


def engine(milliseconds=(10.0, 10.0, 30.0, 50.0)):
    """A replica's steps, of conversations with several turns."""
    return EngineSteps(
        step_ms=milliseconds,
        running=[4, 4, 2, 1], drafted=[0, 0, 6, 3], accepted=[0, 0, 2, 1], emitted=[4, 4, 4, 2],
        drafted_at=[3, 3, 3], accepted_at=[2, 1, 0],
        replayed=[True, False, True, True], has_graphs=True,
        turn_steps=[4, 2, 0, 1], turn_emitted=[8, 6, 0, 1],
        counters={"draft_errors": 0, "tracked_requests": 4},
    )  # fmt: skip


PLAIN = EngineSteps(step_ms=[1.0], drafted_at=[0] * 3, accepted_at=[0] * 3, asynchronous=True, replayed=[True])


def metrics_of(*replicas):
    found = rollout_metrics(list(replicas), [0.1], 2)
    return {name.removeprefix("rollout/"): value for name, value in found.items()}


def test_metrics_add_up_over_the_replicas_that_record_them():
    metrics = metrics_of(engine(), PLAIN, engine())
    expected = {
        "tokens": 28, "spec_accept_rate": 6 / 18, "spec_accept_rate/position_2": 1 / 3, "spec_accept_length": 15 / 7,
        "spec_accept_length/turn_1": 2.0, "spec_accept_length/turn_2": 3.0, "spec_accept_length/turn_4": 1.0,
        "asynchronous_scheduling": 0.0, "drafter/draft_errors": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    absent = ("drafter/tracked_requests", "graph_share/with_drafts")  # nobody acts on it; a replica without graphs
    assert not {*absent, "spec_accept_length/turn_3"} & metrics.keys()
    assert metrics_of(PLAIN)["asynchronous_scheduling"] == 1.0
    metrics = metrics_of(engine(), engine(milliseconds=(10.0, 10.0, 10.0, 10.0)))
    assert (metrics["graph_share/with_drafts"], metrics["graph_share/without_drafts"]) == (1.0, 0.5)
    assert metrics["tail_seconds"] == pytest.approx((0.02 + 0.08) / 2), "the mean of the replicas"
    assert metrics["tail_share"] == pytest.approx((20 + 80) / (40 + 100)), "of their time"
    assert metrics["other_ms_per_step"] == metrics["step_ms_per_step"] == 17.5


def test_a_folder_is_built_once_for_its_settings_sources_and_versions(tmp_path):
    (source := tmp_path / "source.py").write_text("a")
    folder, settings, made_of = tmp_path / "built" / "things", {"seed": 0}, (source, "numpy")

    def make(content, settings=settings, made_of=made_of):
        return build_once(folder, "things", settings, made_of, lambda new: (new / "thing").write_text(content))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(make, ("first", "first"))) == [False, True], "of two at once one builds"
    assert not make("again") and (folder / "thing").read_text() == "first"

    def fail(output):
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
