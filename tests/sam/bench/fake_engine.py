"""A process that speaks sam.vllm.bench.engine's protocol without an engine.

FAKE (JSON, from the environment): `seconds` by variant; `refuses` or `dies` (after a load) a variant; `folder` for
notes of what it was asked, and of a process that it leaves running.
"""

import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path


def run(variant, seconds, batches, sampling):
    """Stock has tokens of its own; all others have the same."""
    requests, of = [request for batch in batches for request in batch], "stock" if variant == "stock" else "ours"
    counts = {"drafted": 20, "accepted": 10, "verify_steps": 10, "verified_tokens": 20, "draft_errors": 0}
    return {
        "seconds": seconds,
        "steps": 10 * len(batches),
        "tokens": len(requests) * (sampling["max_tokens"] or 1),
        "responses": [f"{of} {request['seed']} {request['prompt_token_ids']}" for request in requests],
        **(dict.fromkeys(counts) if variant == "stock" else counts),
    }


def main():
    fake, pipe = json.loads(os.environ["FAKE"]), Connection(int(sys.argv[1]))
    started, variant = json.loads(pipe.recv_bytes()), "stock"
    if not started["is_stock"]:
        keys = started["speculation"]
        variant = "sam-k2" if keys["policy"] == "always" else keys["method"]
    assert ("VLLM_USE_V2_MODEL_RUNNER" in os.environ) != started["is_stock"], "stock has none of our variables"
    left = subprocess.Popen(["sleep", "600"], pass_fds=(pipe.fileno(),))
    with (Path(fake["folder"]) / f"{variant}.jsonl").open("a") as notes:
        print(f"this is {variant}", flush=True)
        if variant == fake.get("refuses"):
            pipe.send_bytes(json.dumps({"error": "unrecognized arguments: --wings"}).encode())
            return 1
        reply = {}
        while True:
            print(json.dumps({"left": left.pid}), file=notes, flush=True)
            pipe.send_bytes(json.dumps(reply).encode())
            try:
                command = json.loads(pipe.recv_bytes())
            except (EOFError, KeyboardInterrupt):
                return 0
            if variant == fake.get("dies") and command["batches"][0][0]["seed"] not in (0, 1 << 20, 2 << 20):
                os._exit(9)
            print(json.dumps(command), file=notes, flush=True)
            reply = run(variant, fake["seconds"][variant], **command)


if __name__ == "__main__":
    sys.exit(main())
