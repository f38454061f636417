"""A process that speaks sam.vllm.bench.engine's protocol without an engine.

FAKE (JSON, from the environment): `seconds` by variant; `refuses`, `dies`, or `dies_at_run` a variant; `leaves` a file
for the id of a process that it leaves running.
"""

import json
import os
import subprocess
import sys


def digest(variant, request):
    """Stock has its own tokens; all others have the same."""
    return f"{'stock' if variant == 'stock' else 'ours'} {request['seed']} {request['prompt_token_ids']}"


def recorded(stock, seconds, requests):
    """Ten equal steps."""
    ends = {"ends": [seconds * (i + 1) / 10 for i in range(10)], "unfinished": [requests] * 9 + [0]}
    if stock:
        return ends
    counts = {"running": requests, "prefilling": 0, "drafted": 3, "accepted": 1, "step_ms": seconds * 100}
    columns = {name: [value] * 10 for name, value in counts.items()}
    return ends | {"columns": columns, "followed": [[[], [5]], [[6, 9, 8], [6, 7]], [[8], [8, 4]]]}


def run(fake, variant, command, number):
    requests, stock = command["run"], variant == "stock"
    seconds = fake["seconds"][variant] * (1 + 0.001 * number)
    return {
        "seconds": seconds,
        "steps": 10,
        "tokens": len(requests) * command["sampling"]["max_tokens"],
        "responses": [digest(variant, request) for request in requests],
        "as_recorded": sum(request["response"] is not None for request in requests) or None,
        "memory_mib": 100.0,
        "asynchronous": False,
        "drafted": None if stock else 20 * (variant == "sam"),
        "accepted": None if stock else 10 * (variant == "sam"),
        "verify_steps": None if stock else 10 * (variant == "sam"),
        "verified_tokens": None if stock else 20 * (variant == "sam"),
        "draft_errors": None if stock else 0,
        "replays": None,
        **{name: None if stock else 10.0 for name in ("forward_ms", "verify_ms", "draft_ms")},
        **({"recorded": recorded(stock, seconds, len(requests))} if command["record"] else {}),
    }


def main():
    fake, (commands, replies) = json.loads(os.environ["FAKE"]), map(int, sys.argv[1:])
    if path := fake.get("leaves"):
        left = subprocess.Popen(["sleep", "600"], pass_fds=(replies,))
        with open(path, "a") as file:
            file.write(f"{left.pid}\n")

    def reply(content):
        os.write(replies, (json.dumps(content) + "\n").encode())

    with os.fdopen(commands) as lines:
        variant = json.loads(next(lines))["variant"]
        print(f"this is {variant}", flush=True)
        if variant == fake.get("refuses"):
            reply({"error": "unrecognized arguments: --wings"})
            return 1
        if variant == fake.get("dies"):
            os._exit(3)
        reply({"longest_text": fake.get("longest_text", 4096)})
        for number, line in enumerate(lines):
            if variant == fake.get("dies_at_run") and number == 2:
                os._exit(9)
            reply(run(fake, variant, json.loads(line), number))
    return 0


if __name__ == "__main__":
    sys.exit(main())
