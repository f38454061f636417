"""The math data sets, made from files in the published formats."""

import pandas
import pytest

from recipe.sam_dapo import data
from recipe.sam_dapo.trainer.reward import compute_score


def published_row(question: str, index: int, source: str = "math_dapo") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
        "extra_info": {"index": str(index)},
    }


@pytest.fixture
def make(tmp_path):
    """Runs the command on published files as they are: each problem of DAPO-Math and AIME many times over."""
    (folder := tmp_path / "published").mkdir()
    questions = [f"What is {number} + 1?" for number in range(5)]
    rows = [published_row(question, index) for index, question in enumerate(questions * 100)]
    pandas.DataFrame(rows).to_parquet(folder / "dapo-math-17k.parquet")
    rows = [published_row(question, index, "aime2024") for index, question in enumerate(questions[:3] * 32)]
    pandas.DataFrame(rows).to_parquet(folder / "aime-2024.parquet")
    gsm8k = pandas.DataFrame({"question": ["How many?"], "answer": ["2 and 1,000 is\n#### 1,002"]})
    for split in ("train", "test"):
        gsm8k.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return lambda *names: data.main([*names, "--output", str(tmp_path / "data"), "--from", str(folder)])


def test_every_problem_once_in_verls_format_and_as_rewards_know_it_and_what_is_there_stays(make, tmp_path, capsys):
    assert make() == 0
    rows = {name: pandas.read_parquet(tmp_path / "data" / f"{name}.parquet") for name in data.SOURCES}
    assert {name: len(frame) for name, frame in rows.items()} == {
        "dapo_math_17k": 5, "aime_2024": 3, "gsm8k_train": 1, "gsm8k_test": 1,
    }  # fmt: skip
    assert {tuple(frame.columns) for frame in rows.values()} == {data.COLUMNS}
    assert rows["gsm8k_test"].iloc[0]["prompt"][0]["content"].startswith("How many? Let's think step by step")
    assert "5 rows from dapo-math-17k.parquet" in capsys.readouterr().out
    answers = {"dapo_math_17k": "So. Answer: 34", "aime_2024": "Answer: 34", "gsm8k_test": "It is\n#### 1,002"}
    for name, answer in answers.items():
        row = rows[name].iloc[0]
        assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["acc"] == 1.0, name
    (target := tmp_path / "data" / "aime_2024.parquet").write_text("kept")
    assert make("aime_2024") == 0 and target.read_text() == "kept"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([published_row("a", 0), published_row("b", 1) | {"prompt": None}], "row 2: not a row of the published file"),
        ([published_row("a", 0) | {"reward_model": {"ground_truth": None}}], "row 1: expected texts as data_source"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], "not the published file"),
        ("html", "not the published file"),
        (None, "holds no aime-2024.parquet"),
    ],
)
def test_a_wrong_file_or_row_is_one_line(make, tmp_path, capsys, content, message):
    path = tmp_path / "published" / "aime-2024.parquet"
    path.unlink()
    if isinstance(content, str):
        path.write_text(content)
    elif content:
        pandas.DataFrame(content).to_parquet(path)
    assert make("aime_2024") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "data" / "aime_2024.parquet").exists()


def test_no_network_says_what_to_do(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    assert data.main(["aime_2024", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cannot be fetched (no route): download it elsewhere and give its folder with --from" in said
