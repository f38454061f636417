"""A conversation of several turns with a tool, by verl's own agent loop: its turns are drafted for as one text, and
have the same tokens with drafts, in chunks, as without."""

import re

import pandas
import pytest

from sam.replay import main as replay
from sam_recipe.report.page import main as report
from sam_recipe.report.runs import Run
from sam_recipe.tiny.tokenizer import build_tokenizer
from tests.end_to_end.runs import SHORT, end, rows, start
from tests.sam.history.kept import kept

STEPS, TURNS = 2, 4
CALCULATOR = r'''
import json
import re

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def calculator(line: str) -> str:
    """Add two digits, modulo 10.

    Args:
        line: with two digits and + between them.
    """
    found = re.search(r"(\d)\+(\d)", line)
    return f"{found[0]} is {(int(found[1]) + int(found[2])) % 10}" if found else "no sum"


@ToolParser.register("sums")
class Sums(ToolParser):
    """Every line is a call, and ends a turn."""

    @property
    def stop_token_ids(self):
        return self.tokenizer.encode("\n")

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        call = FunctionCall(name="calculator", arguments=json.dumps({"line": text}))
        return text, [call] if text.endswith("\n") else []
'''
REWARD = r"""
import re


def reward(data_source, solution_str, ground_truth, extra_info=None):
    said = re.findall(r"(\d)\+(\d) is (\d)", solution_str)
    return sum((int(a) + int(b)) % 10 == int(c) for a, b, c in said) / 8
"""
OWN = (
    "data.train_files=own.parquet", "data.val_files=own.parquet", f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=calculator.py",
    "actor_rollout_ref.rollout.multi_turn.format=sums", "actor_rollout_ref.rollout.max_model_len=320",
    f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={TURNS}",
    "reward.custom_reward_function.path=reward.py", "reward.custom_reward_function.name=reward",
    "data.max_response_length=160", "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
)  # fmt: skip


@pytest.mark.e2e
def test_turns_and_tools_are_one_text_of_the_prompts_group(python_with_verl, assets, tmp_path, capsys):
    for name, text in {"calculator.py": CALCULATOR, "reward.py": REWARD}.items():
        (tmp_path / name).write_text(text)
    pandas.read_parquet(assets / "train.parquet").assign(agent_name="tool_agent").to_parquet(tmp_path / "own.parquet")
    runs = {}
    for name, overrides in {
        "off": ("speculation=off", "routing=verl"),
        "sam": ("speculation.scope=history", "routing=context", "routing.chunk_tokens=8"),
    }.items():
        run = start(assets, tmp_path / name, *SHORT, *OWN, *overrides, folder=tmp_path, python=python_with_verl)
        end(run, tmp_path / name)
        runs[name] = Run.load(tmp_path / name)
    sam, off = runs["sam"], runs["off"]
    decode, given, generated = build_tokenizer().decode, 0, 0
    for step in range(1, STEPS + 1):
        texts = [rows(run.directory / "rollouts" / f"{step}.jsonl") for run in (sam, off)]
        assert texts[0] == texts[1] and len(texts[0]) == 16
        assert sam.metrics[step]["actor/grad_norm"] == off.metrics[step]["actor/grad_norm"] > 0
        for row in texts[0]:
            tokens, begin, spans = row["response_tokens"], 0, row["given_spans"]
            assert len(spans) < TURNS
            for first, last in spans:  # verl ends the turn before, and begins the next one
                its = re.search(r"\d\+\d", line := decode(tokens[begin:first]))
                assert f"tool\n{f'{its[0]} is ' if its else 'no sum'}" in decode(tokens[first:last]), line
                begin = last
            given += (part := sum(last - first for first, last in spans))
            generated += len(tokens) - part
        assert any(len(row["given_spans"]) == TURNS - 1 for row in texts[0])
        assert sam.metrics[step]["rollout/spec_accept_length/turn_2"] > 1
        assert sam.metrics[step]["rollout/drafter/draft_errors"] == 0
    for row in rows(sam.directory / "rollouts" / "1.jsonl"):  # what the drafter followed, the tool's answers among it
        texts, tokens = kept(sam.directory / "history", row["prompt_tokens"]), row["response_tokens"]
        assert len(tokens) < 2 or any(text[: len(tokens)] == tokens for text in texts)
    assert replay(["--traces", str(sam.directory)]) == 0
    tokens, others, length = capsys.readouterr().out.splitlines()[1].split()[2:5]
    assert (int(tokens), int(others)) == (generated, given) and float(length) > 1
    assert report([str(sam.directory), str(off.directory)]) == 0
    assert "by turn (first replica)" in capsys.readouterr().out
