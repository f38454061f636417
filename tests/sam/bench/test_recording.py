"""Which groups of a recording are forced."""

import json

import numpy as np
import pytest

from sam.bench.recording import read_groups


def write(path, groups):
    """A recording of groups given as (prompt, responses)."""
    rows = [{"prompt_tokens": prompt, "response_tokens": response} for prompt, its in groups for response in its]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_large_group_gives_several_and_other_prompts_come_first(tmp_path):
    path = write(tmp_path / "a.jsonl", [([1], [[i] * 3 for i in range(5)]), ([2], [[7], [8]]), ([3], [[9]])])
    groups, notes = read_groups(path, None, [1, 4], 2, None)
    assert [(group.prompt, group.responses) for group in groups] == [
        ([1], [[0] * 3, [1] * 3]), ([2], [[7], [8]]), ([1], [[2] * 3, [3] * 3]),
    ]  # fmt: skip
    assert notes == ["1 of 3 prompts have fewer than 2 responses and are left out"]


def test_a_small_load_needs_small_groups_only(tmp_path):
    path = write(tmp_path / "a.jsonl", [([1], [[1], [2]])])
    assert len(read_groups(path, None, [1], 8, None)[0]) == 2
    with pytest.raises(ValueError, match="its largest group has 2 responses, --samples 8 needs 4"):
        read_groups(path, None, [1, 4], 8, None)


def test_longer_responses_are_cut(tmp_path):
    path = write(tmp_path / "a.jsonl", [([1], [[1, 2, 3], [4]])])
    assert read_groups(path, None, [2], 2, 2)[0][0].responses == [[1, 2], [4]]


def test_a_run_directory_has_its_steps_in_order(tmp_path):
    for step in (1, 2, 10):
        write(tmp_path / "run" / "rollouts" / f"{step}.jsonl", [([5], [[step], [step]])])
    groups, _ = read_groups(tmp_path / "run", None, [2], 2, None)
    assert [group.responses[0] for group in groups] == [[1], [2], [10]]
    with pytest.raises(ValueError, match="no rollouts"):
        read_groups(tmp_path, None, [2], 2, None)


def test_arrays(tmp_path):
    arrays = {
        "prompt_tokens": [1, 2, 3], "prompt_offsets": [0, 1, 3], "response_tokens": [4, 5, 6],
        "response_offsets": [0, 2, 3], "response_prompt": [1, 0],
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in arrays.items()})
    groups, _ = read_groups(tmp_path / "a.npz", None, [1], 1, None)
    assert groups == [([1], [[6]]), ([2, 3], [[4, 5]])]
