"""The counts of sam.headroom on texts whose contexts are known."""

import numpy as np

from sam.headroom import headroom, main


def save(path, *responses):
    offsets = np.concatenate([[0], np.cumsum([len(response) for response in responses])])
    np.savez(path, prompt_tokens=[0], prompt_offsets=[0, 1], response_tokens=np.concatenate(responses),
             response_offsets=offsets, response_prompt=np.zeros(len(responses), int))  # fmt: skip
    return path


def test_repetition_leaves_nothing_to_choose(tmp_path):
    counts = headroom(save(tmp_path / "repeated.npz", np.arange(1, 51), np.arange(1, 51)))
    assert counts["tokens"] == 100
    assert counts["single"] + counts["several"] == 100
    assert counts["other_right"] == 0


def test_random_text_is_a_matter_of_luck(tmp_path, capsys):
    path = save(tmp_path / "random.npz", np.random.default_rng(0).integers(4, size=4000))
    counts = headroom(path)
    assert abs(counts["right"] / counts["several"] - 0.25) < 0.04
    assert counts["second_right"] <= counts["other_right"] <= counts["several"] - counts["right"]
    assert counts["single_right"] <= counts["single"]
    assert main(["--traces", str(path)]) == 0
    assert "random.npz" in capsys.readouterr().out
    assert main(["--traces", str(tmp_path / "missing.npz")]) == 2
    assert "no such file" in capsys.readouterr().err
