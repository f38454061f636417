"""switch_bench: engines side by side, slice by slice, and a table of ratios taken run by run."""

import pytest

from recipe.switch_bench import __main__ as switch_bench
from recipe.switch_bench.__main__ import run_side_by_side, shuffle
from recipe.switch_bench.table import Runs, as_text, plot, table


class FakeEngine:
    """An engine that takes so many slices and gives these tokens."""

    def __init__(self, variant, slices, tokens, log, policy=None):
        self.variant, self.slices, self.tokens, self.log, self.policy = variant, slices, tokens, log, policy

    def begin(self, work):
        self.left = self.slices

    def advance(self):
        self.log.append(self.variant)
        self.left -= 1
        return self.left > 0

    def end(self, runs):
        runs.seconds.append(float(self.slices))
        return self.tokens


def test_engines_take_turns_until_each_is_done():
    log = []
    engines = [FakeEngine("off", 3, {"0": (1, 2)}, log), FakeEngine("goodput", 1, {"0": (1, 2)}, log)]
    results = {"off": Runs(), "goodput": Runs()}
    run_side_by_side(engines, None, results)
    assert log == ["off", "goodput", "off", "off"]
    assert results["off"].seconds == [3.0] and results["goodput"].seconds == [1.0]


def test_policies_change_engines_and_engines_their_order():
    peers = [FakeEngine(variant, 1, {}, []) for variant in ("off", "ngram")]
    names = ("threshold 4", "always", "goodput")
    engines = peers + [FakeEngine(name, 1, {}, [], policy=f"policy of {name}") for name in names]
    alike, orders, made = engines[2:], set(), {name: set() for name in names}
    for seed in range(30):
        shuffle(engines, seed)
        orders.add(tuple(map(id, engines)))
        for place, engine in enumerate(alike):
            assert engine.policy == f"policy of {engine.variant}"
            made[engine.variant].add(place)
        assert [peer.variant for peer in peers] == ["off", "ngram"] and {peer.policy for peer in peers} == {None}
    assert len(orders) > 20 and all(places == {0, 1, 2} for places in made.values())


def test_variants_that_give_other_tokens_are_an_error():
    engines = [FakeEngine("off", 1, {"0": (1, 2)}, []), FakeEngine("ngram", 1, {"0": (1, 3)}, [])]
    with pytest.raises(RuntimeError, match="ngram gave other tokens than off"):
        run_side_by_side(engines, None, {"off": Runs(), "ngram": Runs()})


def test_ratios_are_of_the_same_run():
    results = {
        "single": {
            "off": Runs(seconds=[4.0, 8.0, 6.0], tail=[4.0, 8.0, 6.0]),
            "goodput": Runs(seconds=[2.0, 2.0, 2.0], tail=[2.0, 4.0, 3.0], drafted=9, accepted=4, on_share=0.5),
        }
    }
    off, goodput = table(results)
    assert off["speedup"] == 1.0
    assert goodput["speedup"] == 3.0 and goodput["range"] == [2.0, 4.0] and goodput["tail_speedup"] == 2.0
    assert off["goodput_gain"] == [3.0, 2.0, 4.0] and goodput["goodput_gain"] == [1.0, 1.0, 1.0]
    assert "3.000 (2.000-4.000)   2.00       9        4 1.000 (1.000-1.000)" in as_text([off, goodput])


def test_picture(tmp_path, pictures):
    rows = [
        {"workload": workload, "variant": variant, "speedup": 1.5, "range": [1.4, 1.7]}
        for workload in switch_bench.WORKLOADS
        for variant in switch_bench.VARIANTS
    ]
    plot(rows, "a test", tmp_path / "bench.png")
    ((first, *others),) = [figure.axes for figure in pictures]
    assert [axes.get_title() for axes in (first, *others)] == list(switch_bench.WORKLOADS)
    assert [label.get_text() for label in first.get_yticklabels()] == list(switch_bench.VARIANTS)
    for axes in (first, *others):
        assert [bar.get_width() for bar in axes.patches] == [1.5] * len(switch_bench.VARIANTS)


def test_without_assets_one_line_says_how_to_build_them(tmp_path, capsys):
    assert switch_bench.main(["--assets", str(tmp_path)]) == 2
    assert "no tiny model; build it with python -m recipe.tiny.assets" in capsys.readouterr().err
