"""vllm-ascend's own Triton kernels, under Triton's interpreter, against sam.verify: the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).with_name("published_kernels.py")


def test_the_published_kernels_agree_with_sam_verify():
    finished = subprocess.run([sys.executable, str(KERNELS)], capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    counts = json.loads(finished.stdout.splitlines()[-1])
    assert counts["cases"] == 40
    assert counts["accepted"] > 20 and counts["rejected"] > 20
