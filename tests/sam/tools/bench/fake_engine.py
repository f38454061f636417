"""A process that speaks sam.vllm.bench.engine's protocol without an engine.

FAKE (JSON, from the environment): `seconds` by variant; `refuses`, `dies` (after so many loads) or `deaf` (does not
end) a variant; `folder` for notes of what it was told and asked, and of its processes, one of which it leaves running.
"""

import json
import os
import signal
import subprocess
import sys
import time
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
    speculation, variant = json.loads(pipe.recv_bytes())["speculation"], "stock"
    if speculation is not None:
        variant = "sam-k2" if speculation["policy"] == "always" else speculation["method"]
    if variant == fake.get("deaf"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    left = subprocess.Popen(["sleep", "600"], pass_fds=(pipe.fileno(),))
    with (Path(fake["folder"]) / f"{variant}.jsonl").open("a") as notes:
        print(f"this is {variant}", flush=True)
        print(json.dumps({"processes": [os.getpid(), left.pid], "speculation": speculation}), file=notes, flush=True)
        if variant == fake.get("refuses"):
            pipe.send_bytes(json.dumps({"error": "unrecognized arguments: --wings"}).encode())
            return 1
        reply = {}
        for number in range(1 << 30):
            pipe.send_bytes(json.dumps(reply).encode())
            try:
                command = json.loads(pipe.recv_bytes())
            except (EOFError, KeyboardInterrupt):
                time.sleep(600 if variant == fake.get("deaf") else 0)
                return 0
            if variant == fake.get("dies", [None])[0] and number == fake["dies"][1]:
                os._exit(9)
            print(json.dumps(command), file=notes, flush=True)
            reply = run(variant, fake["seconds"][variant], **command)


if __name__ == "__main__":
    sys.exit(main())
