"""Rows, verdicts, warnings and settings to paste, from measured rounds."""

import pytest

from sam.bench.charts import drafts, ratios, running, step_costs
from sam.bench.table import as_text, batches_in_words, recommendation, rows_of, split_of_step, verdicts_of, warnings_of
from sam.bench.verdict import GO, NO_GO, NOISY, decide
from tests.sam.bench.test_settings import settings

STAGES = {"forward_ms": 400.0, "verify_ms": 100.0, "draft_ms": 50.0}  # of 50 steps


def measured(seconds, load=0, round_=1, tokens=100, responses=("a", "b"), draft_errors=0):
    """One line of rounds.jsonl, with the variants' seconds."""
    runs = {}
    for variant, one in seconds.items():
        drafts = 30 if variant == "sam" else 0
        counts = {"drafted": drafts, "accepted": drafts // 2, "verify_steps": drafts // 3, "verified_tokens": 25}
        runs[variant] = {
            "seconds": one, "steps": 50, "tokens": tokens if variant == "sam" else 100, "memory_mib": 10.0 + one,
            "start_s": 3.0, "draft_errors": draft_errors, "asynchronous": False, "replays": None, **counts, **STAGES,
            "responses": list(responses) if variant == "sam" else ["a", "b"],
        }  # fmt: skip
        if variant == "stock":
            runs[variant] |= dict.fromkeys([*counts, *STAGES, "draft_errors"])
    return {"round": round_, "load": load, "requests": settings().requests[load], "runs": runs}


def rounds_of(sam_seconds, **others):
    return [
        measured({"stock": 2.0, "off": 1.9, "sam": one}, round_=round_, **others)
        for round_, one in enumerate(sam_seconds, start=1)
    ]


def test_ratios_are_of_the_same_round():
    lines = [
        measured({"stock": 2.0, "off": 2.0, "sam": 1.0}),
        measured({"stock": 8.0, "off": 8.0, "sam": 2.0}, round_=2),
        measured({"stock": 3.0, "off": 3.0, "sam": 1.0}, round_=3),
    ]
    stock, off, sam = rows_of(lines, settings())
    assert (sam["ratio"], sam["low"], sam["high"]) == (3.0, 2.0, 4.0)
    assert stock["ratio"] == off["ratio"] == 1.0
    assert (sam["seconds"], sam["step_ms"], sam["tokens_per_s"]) == (1.0, 20.0, 100.0)
    assert (sam["drafted"], sam["accepted"], sam["acceptance_length"]) == (90, 45, 2.5)
    assert stock["drafted"] is stock["acceptance_length"] is None
    assert (off["drafted"], off["acceptance_length"]) == (0, 1.0)
    assert (sam["identical"], sam["responses"]) == (6, 6)


def test_a_load_that_is_not_measured_has_no_row():
    assert {row["requests"] for row in rows_of(rounds_of([1.0]), settings())} == {1}
    assert rows_of([], settings()) == [] and verdicts_of([], settings()) == {}


def test_tokens_are_compared_where_they_must_be_equal():
    lines = rounds_of([1.0] * 3, responses=("a", "c"))
    sam = rows_of(lines, settings())[-1]
    assert (sam["identical"], sam["responses"]) == (3, 6)
    assert "sam at 1 request: 3 responses differ from those of off" in warnings_of(
        rows_of(lines, settings()), settings()
    )
    for others in ({"seeds": False}, {"variants": ["stock", "sam"]}):
        assert rows_of(lines, settings(**others))[-1]["identical"] is None
    assert rows_of(lines, settings(seeds=False, temperature=0.0))[-1]["identical"] == 3


def test_a_reader_is_warned_of_what_makes_seconds_worthless():
    rows = rows_of(rounds_of([1.0] * 3, tokens=120, draft_errors=2), settings())
    assert warnings_of(rows, settings()) == [
        "off at 1 request: drafting failed 6 times: see off.log",
        "sam at 1 request: drafting failed 6 times: see sam.log",
        "sam at 1 request: 1.20 times the tokens of stock, so that seconds are not of the same work: use "
        "--ignore-eos or more rounds",
    ]
    assert warnings_of(rows_of(rounds_of([1.0] * 3), settings()), settings()) == []


def test_a_slowed_sam_is_a_no_go():
    fast = rounds_of([1.5, 1.45, 1.4])
    assert verdicts_of(fast, settings())[1].answer == GO
    slowed = rounds_of([1.5 * 1.6, 1.45 * 1.6, 1.4 * 1.6])
    verdict = verdicts_of(slowed, settings())[1]
    assert verdict.answer == NO_GO and verdict.line(1).startswith("no-go: 0.86x")
    assert verdicts_of(rounds_of([1.5, 2.4, 2.0]), settings())[1].answer == NOISY


def test_without_stock_off_is_the_reference():
    alone = settings(variants=["off", "sam"])
    lines = [measured({"off": 3.0, "sam": 2.0})]
    assert rows_of(lines, alone)[-1]["ratio"] == 1.5
    assert "over off" in as_text(rows_of(lines, alone), alone)
    assert verdicts_of(lines, settings(variants=["stock", "off"])) == {}


@pytest.mark.parametrize(
    "ratios, expected",
    [
        ({1: 1.5, 8: 1.2}, "speculation=sam speculation.policy=goodput speculation.num_speculative_tokens=8"),
        ({1: 1.5, 8: 0.9}, "num_speculative_tokens=8   # loses at 8"),
        ({1: 1.5, 8: None}, "num_speculative_tokens=8   # is not known at 8"),
        ({1: 0.8, 8: 0.9}, "speculation=off"),
        ({1: None, 8: 0.9}, "no recommendation yet"),
    ],
)
def test_settings_to_paste(ratios, expected):
    found = {requests: decide([0.5, 1.0, 2.0] if one is None else [one] * 3) for requests, one in ratios.items()}
    text = recommendation({requests: verdict for requests, verdict in found.items()}, settings())
    assert expected in text


def test_pasted_settings_are_settings():
    from sam.config import SpeculationConfig

    words = recommendation({1: decide([1.5] * 3)}, settings()).split()
    pairs = dict(word.removeprefix("speculation.").split("=") for word in words[1:])
    pairs["num_speculative_tokens"] = int(pairs["num_speculative_tokens"])
    assert SpeculationConfig.from_dict({"method": "sam", **pairs}).policy == "goodput"


def test_text_and_picture():
    lines = rounds_of([1.0, 1.25, 1.0]) + [measured({"stock": 2.0, "off": 2.1, "sam": 2.2}, load=1)]
    rows = rows_of(lines, settings())
    text = as_text(rows, settings())
    assert "2.00x (1.60-2.00)    1.85x  6 of 6" in text
    assert "sam: started in 3.0 s, 12 MiB, schedules step by step" in text
    (axes,) = ratios(rows, settings()).axes
    assert [label.get_text() for label in axes.get_legend().get_texts()] == ["off", "sam"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]


def test_a_step_is_split_as_far_as_the_engine_tells():
    stock, off, _ = rows_of(rounds_of([1.0]), settings())
    assert split_of_step(stock) is None
    assert split_of_step(off) == ["8.00", "2.00", "1.00", "27.00", "38.00"]
    assert "off at 1 request, a step: forward 8.00, sampling 2.00, drafting 1.00, all else 27.00 ms" in as_text(
        [off], settings()
    )


def test_step_costs_leave_out_prompts_and_the_first_step():
    columns = {"prefilling": [1, 0, 0, 0], "running": [4, 4, 4, 2], "drafted": [0, 0, 8, 2], "step_ms": [9, 1, 3, 2]}
    ours = {"ends": [0.9], "unfinished": [0], "columns": columns}
    stock = {"ends": [0.5, 0.6, 0.8], "unfinished": [4, 4, 0]}
    figure = step_costs({(4, "stock"): [stock], (4, "sam"): [ours]})
    lines = {line.get_label(): line.get_xydata().round(3).tolist() for line in figure.axes[0].get_lines()}
    assert lines == {"stock": [[4, 150.0]], "sam": [[4, 1.5], [12, 3.0]]}
    (axes,) = running({(4, "stock"): [stock], (4, "sam"): [ours]}, 4).axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[0, 4], [0.5, 4], [0.6, 4], [0.8, 0]]


def test_pictures_of_several_batches():
    """Each batch's first step is left out of the costs, and over time they follow one another."""
    columns = {
        "prefilling": [0] * 3, "running": [2, 2, 1], "drafted": [0, 4, 0], "accepted": [0, 1, 0],
        "step_ms": [500, 4, 6],
    }  # fmt: skip
    one, other = ({"ends": [0.5, 0.504, end], "unfinished": [2, 1, 0], "columns": columns} for end in (0.51, 0.52))
    stock = [{name: batch[name] for name in ("ends", "unfinished")} for batch in (one, other)]
    figure = step_costs({(2, "stock"): stock, (2, "sam"): [one, other]})
    lines = {line.get_label(): line.get_xydata().round(3).tolist() for line in figure.axes[0].get_lines()}
    assert lines == {"stock": [[1, 11.0], [2, 4.0]], "sam": [[1, 6.0], [6, 4.0]]}
    (axes,) = running({(2, "stock"): stock}, 2).axes
    assert axes.get_lines()[0].get_xydata().round(3).tolist() == [
        [0, 2], [0.5, 2], [0.504, 1], [0.51, 0], [0.51, 2], [1.01, 2], [1.014, 1], [1.03, 0],
    ]  # fmt: skip
    (axes,) = drafts([one, other], 2, "sam").axes
    assert axes.get_xlim()[1] > 1.0 and drafts(stock, 2, "stock") is None


def test_batches_of_a_round_are_told():
    words = batches_in_words(settings(requests=[1, 6, 24], responses=8))
    assert words == "8 of 1 request, 2 of 6 requests, 1 of 24 requests"


def test_who_loses_asynchronous_scheduling_is_named():
    line = measured({"stock": 2.0, "off": 2.0, "sam": 1.0})
    for variant in ("stock", "off"):
        line["runs"][variant]["asynchronous"] = True
    rows = rows_of([line], settings())
    assert "off: started in 3.0 s, 12 MiB, schedules asynchronously" in as_text(rows, settings())
    (warning,) = [text for text in warnings_of(rows, settings()) if "schedules" in text]
    assert warning.startswith("sam schedules step by step, stock asynchronously")


def test_steps_that_replayed_a_graph_are_told_by_phase():
    lines = rounds_of([1.0, 1.1])
    assert "schedules step by step; graphs: none" in as_text(rows_of(lines, settings()), settings())
    for line in lines:
        for variant, drafted in (("off", 0), ("sam", 30)):
            line["runs"][variant]["replays"] = {"with_drafts": [drafted, drafted], "without_drafts": [45, 50]}
    rows = rows_of(lines + [measured({"stock": 2.0, "off": 2.0, "sam": 1.0}, load=1)], settings())
    assert rows[2]["replays"] == {"with_drafts": (60, 60), "without_drafts": (90, 100)}
    text = as_text(rows[:3], settings())
    assert "stock: started in 3.0 s, 12 MiB, schedules step by step; graphs: not told" in text
    assert "off: started in 3.0 s, 12 MiB, schedules step by step; graphs: 90 of 100 steps without drafts" in text
    assert "graphs: 60 of 60 steps with drafts, 90 of 100 steps without drafts" in text
    assert rows[-1]["replays"] is None  # of an earlier version
