"""A user's rewards; `judge` raises for an eighth of all responses."""

import zlib


def judge(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    kind = zlib.crc32(solution_str.encode()) % 8
    if data_source != "own" or kind == 0:
        raise ValueError(f"no verdict for {kind}")
    return {"score": scale * (kind % 2), "acc": float(kind % 2)}


def count(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 7)
