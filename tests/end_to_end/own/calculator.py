"""A user's tool, and how calls to it are found in verl's own agent loop with tools."""

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
