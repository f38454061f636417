"""The published sampler against ours in this environment: operations, passes over the logits, host reads."""

from functools import partial
from pathlib import Path

from sam import verify
from sam.verify import bench
from sam.verify.originals import load_original

CACHE = Path(__file__).parents[2] / ".cache" / "peers"


def test_ours_touches_the_logits_least_and_never_reads_the_device(capsys):
    case = bench._case(16, 3, 4001, "cpu", 0)
    rules = {
        bench.EXACT: bench.exact_match,
        bench.REJECTION: partial(bench.rejection, verify.rejection_sample),
        bench.ASCEND: partial(bench.rejection, load_original(CACHE).rejection_sample),
    }
    counts = {name: bench.count_operations(partial(rule, case), case.target.numel()) for name, rule in rules.items()}
    with capsys.disabled():
        for name, count in counts.items():
            print(f"\n{name}: {count}", end="")
    published = counts.pop(bench.ASCEND)
    for ours in counts.values():
        assert ours["host_syncs"] == 0
        assert ours["large_outputs"] <= 3 < published["large_outputs"]
        assert ours["aten"] < published["aten"]
