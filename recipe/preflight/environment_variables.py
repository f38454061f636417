"""Environment variables that are set but that nothing reads: a misspelt one is silently without effect."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipe.preflight.problem import Problem

PREFIXES = ("HCCL_", "VLLM_", "ASCEND_", "RAY_EXPERIMENTAL_NOSET_", "TASK_QUEUE_", "CPU_AFFINITY_")
# HCCL's and CANN's documented ones that training and inference set; there is no list of them to be read here.
KNOWN = {
    "HCCL_ALGO",
    "HCCL_ASYNC_ERROR_HANDLING",
    "HCCL_BUFFSIZE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_DETERMINISTIC",
    "HCCL_EVENT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_IF_BASE_PORT",
    "HCCL_IF_IP",
    "HCCL_INTRA_PCIE_ENABLE",
    "HCCL_INTRA_ROCE_ENABLE",
    "HCCL_NPU_SOCKET_PORT_RANGE",
    "HCCL_OP_EXPANSION_MODE",
    "HCCL_RDMA_RETRY_CNT",
    "HCCL_RDMA_SL",
    "HCCL_RDMA_TC",
    "HCCL_RDMA_TIMEOUT",
    "HCCL_SOCKET_FAMILY",
    "HCCL_SOCKET_IFNAME",
    "HCCL_WHITELIST_DISABLE",
    "HCCL_WHITELIST_FILE",
    "ASCEND_AICPU_PATH",
    "ASCEND_GLOBAL_EVENT_ENABLE",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "ASCEND_HOME_PATH",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_OPP_PATH",
    "ASCEND_PROCESS_LOG_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_SLOG_PRINT_TO_STDOUT",
    "ASCEND_TOOLKIT_HOME",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
}
# difflib's ratios from which a name counts as a misspelling of another, and its beginning as one of a prefix.
ALIKE, ALIKE_PREFIX = 0.85, 0.8


def find_problems(environment: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    known = KNOWN | {name for package in ("vllm", "vllm_ascend") for name in _read_by(package)}
    for name in sorted(environment):
        if not name.startswith(PREFIXES) and not any(_alike(name, prefix) for prefix in PREFIXES):
            continue
        if name not in known and (meant := difflib.get_close_matches(name, known, 1, ALIKE)):
            yield Problem(
                "environment.misspelt", f"the variable {name} is set, which nothing reads: did you mean {meant[0]}?"
            )


def _alike(name: str, prefix: str) -> bool:
    return difflib.SequenceMatcher(None, name[: len(prefix)], prefix).ratio() >= ALIKE_PREFIX


def _read_by(package: str) -> set[str]:
    """Names in a package's envs.py, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin or not (path := Path(spec.origin).with_name("envs.py")).is_file():
        return set()
    return set(re.findall(r'"([A-Z][A-Z0-9_]+)"', path.read_text()))
