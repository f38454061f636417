"""Both published samplers against ours in this environment: operations, passes over the logits, host reads."""

from functools import partial
from pathlib import Path

from sam.verify import bench, originals

CACHE = Path(__file__).parents[2] / ".cache" / "peers"


def test_ours_touches_the_logits_least_and_never_reads_the_device(capsys):
    case = bench._case(16, 3, 4001, "cpu", 0)
    rules = {
        "ours, exact": bench.exact_match,
        "ours, rejection": bench.standard,
        bench.LOOPED: bench._looped(originals.load_looped_originals(CACHE)),
        bench.VECTORISED: bench._published(originals.load_vectorised_originals(CACHE).rejection_sample),
    }
    counts = {name: bench.count_operations(partial(rule, case), case.target.numel()) for name, rule in rules.items()}
    with capsys.disabled():
        for name, count in counts.items():
            print(f"\n{name}: {count}", end="")
    for ours in ("ours, exact", "ours, rejection"):
        assert counts[ours].host_syncs == 0
        assert counts[ours].large_outputs <= 3 < counts[bench.VECTORISED].large_outputs
        assert counts[ours].aten < counts[bench.VECTORISED].aten < counts[bench.LOOPED].aten
    assert counts[bench.LOOPED].host_syncs > 100
