"""The published sampler against ours in this environment: operations, passes over the logits, host reads."""

from functools import partial
from pathlib import Path

from recipe.preflight import npu_selftest as verifiers
from sam import verify
from tests.sam.verify.cost import count_operations
from tests.sam.verify.originals import load_original

CACHE = Path(__file__).parents[2] / ".cache" / "peers"


def test_ours_touches_the_logits_least_and_never_reads_the_device(capsys):
    case = verifiers.make_case(16, 3, 4001, "cpu")
    rules = {
        "ours, exact": verifiers.exact_match,
        "ours, rejection": partial(verifiers.rejection, verify.rejection_sample),
        "published": partial(verifiers.rejection, load_original(CACHE).rejection_sample),
    }
    counts = {name: count_operations(partial(rule, case), case.target.numel()) for name, rule in rules.items()}
    with capsys.disabled():
        for name, count in counts.items():
            print(f"\n{name}: {count}", end="")
    published = counts.pop("published")
    for ours in counts.values():
        assert ours["host_syncs"] == 0
        assert ours["large_outputs"] <= 3 < published["large_outputs"]
        assert ours["aten"] < published["aten"]
