"""`python -m recipe.sam_dapo.preflight --npu-selftest`, with the simulated NPU as the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_selftest_reports_parity_precision_and_timing(tmp_path):
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "recipe.sam_dapo.preflight", "--npu-selftest"),
            *("--device", "cpu", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": f"{HERE / 'start'}:{HERE.parents[1]}"},
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["vllm-ascend"] == "0.23.0.post1"
    assert ": patched (0001-" in report["patches"]
    # Asynchronous scheduling, which vLLM uses without speculation, is recorded too; it may run a step too many.
    assert 16 * 128 <= report["off"]["emitted"] <= 16 * 129
    assert report["off"]["step_ms"] > 0 and report["exact_verification_ms"] > 0
    for name in ("sam", "sam, graph"):
        row = report["parity"][name]
        assert row["identical"] == row["responses"] == 16
        assert row["compared_tokens"] == 16 * 128 and row["logprob_difference_max"] <= 1e-6
        assert report[name]["accepted"] > 10
