"""Several paths in a simulated rollout: what is verified, what it costs, and when goodput wants it."""

import json

import numpy as np
import pytest

from sam.paths.__main__ import Rollout, main
from sam.paths.drawn import ROWS, TREE, DrawnPaths, PathAcceptance, scaled
from sam.replay.paths import make_steps
from sam.simulate.acceptance import CELL, POSITIONS
from sam.switch.step_cost import linear


def one_record():
    """One verify step: a path of 3 tokens, and one that leaves it after the first token and is taken to its end."""
    steps = make_steps(1, paths=2, depth=3)
    steps.lengths[0], steps.shared[0], steps.accepted[0] = (3, 3), (0, 1), (1, 3)
    steps.acceptance[0] = [[0.9, 0.5, 0.4], [0.9, 0.3, 0.2]]
    cells = np.zeros((1, len(POSITIONS)), CELL)
    cells["size"] = 1
    return PathAcceptance(cells, steps)


def drawn(costs, budgets=(3, 3), least=0.0):
    drafting = DrawnPaths(one_record(), np.zeros(2, np.int64), costs)
    drafts = drafting.draft(np.arange(2), np.array([5, 9]), np.array(budgets), least)
    return drafting, *drafts


def test_a_further_path_brings_its_own_tokens_alone():
    _, acceptance, offsets = drawn(TREE)
    assert offsets.tolist() == [0, 3, 6, 8, 10]
    assert np.allclose(acceptance[:3], [0.9, 0.5, 0.4]) and np.allclose(acceptance[6:8], [0.3, 0.2])
    assert drawn(TREE, least=0.35)[2].tolist() == [0, 3, 6, 6, 6]
    assert drawn(TREE, budgets=(3, 0))[2].tolist() == [0, 3, 3, 5, 5]


@pytest.mark.parametrize("costs, overhead", [(TREE, [0, 0, 0, 0]), (ROWS, [0, 0, 2, 2])])
def test_verified_tokens_are_accepted_along_the_path_that_was_taken(costs, overhead):
    """A row repeats the last sampled token and the one that it shares; a tree does not."""
    drafting, *_ = drawn(costs)
    assert drafting.overhead.tolist() == overhead
    more = overhead[2]
    # First request: no further path, then of one token, then whole. Second request: nothing at all.
    for own, accepted in ((0, 1), (1, 2), (2, 3)):
        lengths = np.array([3, 0, own + more if own else 0, 0])
        assert drafting.verify(lengths).tolist() == [accepted, 0]


def test_probabilities_of_further_paths_are_scaled_to_how_often_they_were_right():
    steps = one_record().steps
    result = scaled(steps)
    assert np.allclose(result.acceptance[0, 0], steps.acceptance[0, 0])
    assert result.acceptance[0, 1, 0] == steps.acceptance[0, 1, 0]  # shared with the first path
    assert result.acceptance[0, 1, 1:].sum() == pytest.approx(2.0)  # both its tokens were right


@pytest.fixture
def recording(tmp_path):
    rng = np.random.default_rng(0)
    jumps = np.where(rng.random((8, 250)) < 0.7, 1, rng.integers(1, 3, (8, 250)))
    path = tmp_path / "trace.npz"
    np.savez(
        path, prompt_tokens=np.array([1, 2, 3]), prompt_offsets=np.array([0, 3]), response_offsets=np.arange(9) * 250,
        response_tokens=(np.cumsum(jumps, axis=1) % 30 + 1).ravel(), response_prompt=np.zeros(8, int),
    )  # fmt: skip
    return path


def test_free_tokens_save_time_and_dear_ones_are_left_alone(recording, tmp_path, capsys):
    for name, per_token in (("free", 1e-6), ("dear", 5.0)):
        linear(10.0, 0.0, per_token).save(tmp_path / f"{name}.json")
    options = ["--setup", "--seeds", "1", "--paths", "2", "--k", "3", "--log-normal", "200", "400", "0.5", "0.3"]
    tables = [str(tmp_path / name) for name in ("free.json", "dear.json")]
    assert main(["--acceptance", str(recording), "--step-cost", *tables, *options, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    saved = {(row["rollout"], row["costs"]): row["saved_percent"] for row in rows}
    assert min(saved["free", ROWS], saved["free", TREE]) > 5.0
    assert abs(saved["dear", ROWS]) < 1.0
    assert len({row["tokens"] for row in rows}) == 1


def test_part_of_a_set_up_is_some_replicas_with_their_share_of_the_prompts(recording, capsys):
    whole, part = Rollout.published("qwen3_32b", False, 2), Rollout.published("qwen3_32b", False, 2, replicas=1)
    assert (part.cluster.replicas, 4 * part.prompts) == (1, whole.prompts)
    assert part.cluster.max_num_seqs == whole.cluster.max_num_seqs
    most = Rollout.published("qwen3_32b", False, 2, replicas=99)
    assert (most.cluster, most.prompts) == (whole.cluster, whole.prompts)
    with pytest.raises(SystemExit):
        main(["--acceptance", str(recording), "--replicas", "0"])
    assert "--replicas 0" in capsys.readouterr().err
