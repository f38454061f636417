"""Draw the pictures of docs/architecture.md: `python docs/images/draw.py [--output FOLDER]`.

Only matplotlib is needed.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FRAME, LINE = "#222222", "#8a8a8a", "#444444"
UPSTREAM, DOOR, RUNTIME, SOURCE = "#eeeeee", "#cfe8dd", "#fbe3c0", "#f5c6bd"
LEGEND = {
    "verl or vLLM as published": UPSTREAM,
    "ours, through a setting or registry of theirs": DOOR,
    "replaced or wrapped at run time": RUNTIME,
    "source patched (vllm-ascend only)": SOURCE,
}
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"})


def canvas(width: float, height: float):
    """A figure whose coordinates are tenths of an inch, without axes."""
    figure, axes = plt.subplots(figsize=(width / 10, height / 10))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, title, lines, fill) -> None:
    """A rounded box with its lower left corner at (x, y): a bold title and lines below it."""
    style = "round,pad=0,rounding_size=0.8"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=FRAME, lw=0.8))
    top = y + height - 1.0
    axes.text(x + 1.0, top, title, weight="bold", size=8.5, va="top", color=INK)
    axes.text(x + 1.0, top - 2.1, lines, size=7.3, va="top", color=INK, linespacing=1.35)


def frame(axes, x, y, width, height, title, indent=1.0) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=1", facecolor="none", edgecolor=FRAME, ls="--"
        )
    )
    axes.text(x + indent, y + height - 0.9, title, size=8.5, style="italic", va="top", color="#555555")


def arrow(axes, begin, end, label="", at=None, ha="center", bend=0.0, color=LINE) -> None:
    patch = FancyArrowPatch(
        begin, end, arrowstyle="-|>", mutation_scale=9, color=color, lw=1.0, connectionstyle=f"arc3,rad={bend}"
    )
    axes.add_patch(patch)
    if label:
        x, y = at or ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
        axes.text(x, y, label, size=7.2, ha=ha, va="center", color=color)


def strip(axes, x, y, width, text, fill) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, 2.5, facecolor=fill, edgecolor=FRAME, lw=0.5))
    axes.text(x + width / 2, y + 1.2, text, size=6.8, ha="center", va="center", color=INK)


FILES = "metrics.jsonl, rollouts/, engine_steps/,\ncheckpoints/, train.log, state.json"
WORKERS = "verl's worker: FSDP2 or Megatron\nlog-probabilities, update,\nsend the weights"
TRAINER = "DapoTrainer: verl's trainer, in order\nDapoRounds: dynamic sampling\nwrites the record"
# Title, lower left corner, width, height, fill, lines.
PROCESSES = (
    (
        "supervisor",
        2,
        65,
        25,
        7.5,
        DOOR,
        "sam run: checks the config,\nends every process of the run",
    ),
    (
        "driver",
        45,
        65,
        27,
        7.5,
        DOOR,
        "sam run as a child: ray.init;\nends all if the supervisor is killed",
    ),
    ("run_dir", 79, 65, 29, 7.5, "#ffffff", FILES),
    ("training workers", 3, 46.5, 30, 11, UPSTREAM, WORKERS),
    ("TaskRunner", 40, 46.5, 30, 11, DOOR, TRAINER),
    ("TransferQueue", 79, 46.5, 28, 11, UPSTREAM, "prompts, responses and rewards,\nbetween the actors"),
    ("agent loops", 40, 31.5, 30, 8, DOOR, "SeededWorker: a seed for every response\ntoken ids in, token ids out"),
    ("reward workers", 79, 31.5, 28, 8, DOOR, "trainer/reward.py"),
    ("scheduler", 7, 9, 17, 12, UPSTREAM, "running requests\nand their drafts"),
    ("model runner", 29, 9, 21, 12, UPSTREAM, "one forward pass over\n1 + drafts tokens a request"),
    ("sampler", 55, 9, 20, 12, RUNTIME, "ExactSampler, or\nsam.verify's rejection\nsampling: accepts drafts"),
    ("proposer", 80, 9, 23, 12, DOOR, "SamProposer: switch (when),\ndrafter and automaton (what)"),
)
STRIPS = (
    (29.5, 12, 20, "CPU: sam.vllm.cpu_fixes", RUNTIME),
    (29.5, 9.4, 20, "Ascend: patch 0001", SOURCE),
    (55.5, 9.4, 19, "Ascend: patch 0002", SOURCE),
    (29, 4.7, 74, "recorder: StepRecorder times these stages and counts requests, drafts and accepted tokens", RUNTIME),
)
# Begin, end, label, its place and alignment.
FLOWS = (
    ((27, 69), (45, 69), "starts, watches", (36, 70.5), "center"),
    ((59, 65), (59, 57.7), "config", (60, 60.6), "left"),
    ((40, 52), (33, 52), "batch", (36.5, 53.3), "center"),
    ((70, 52), (79, 52), "", None, "center"),
    ((79, 50), (70, 50), "", None, "center"),
    ((55, 46.5), (55, 39.7), "prompts, uids", (56, 43), "left"),
    ((50, 31.5), (50, 28.1), "requests", (49, 29.8), "right"),
    ((60, 28.1), (60, 31.5), "responses", (61, 29.8), "left"),
    ((70, 36.5), (79, 36.5), "responses", (74.5, 37.8), "center"),
    ((79, 34.5), (70, 34.5), "rewards", (74.5, 33.2), "center"),
    ((68, 39.6), (82, 46.4), "responses,\nrewards", (79, 42.5), "left"),
    ((24, 16.5), (29, 16.5), "", None, "center"),
    ((50, 16.5), (55, 16.5), "", None, "center"),
    ((75, 16.5), (80, 16.5), "", None, "center"),
    ((74.9, 67), (79, 67), "", None, "center"),
    ((15.5, 7.9), (15.5, 9.1), "", None, "center"),
)


def draw_processes():
    figure, axes = canvas(110, 74)
    frame(axes, 1, 1, 108, 61, "Ray: actors on one machine or on every node")
    server = "rollout server, one per replica: SpeculationServer checks which drafter and sampler run"
    frame(axes, 3, 2.5, 104, 25.5, server, indent=29.5)
    engine = "vLLM engine process: sam.vllm.plugin installs sampler and drafter"
    frame(axes, 5, 3.7, 100, 20.8, engine, indent=27.5)
    for title, x, y, width, height, fill, lines in PROCESSES:
        box(axes, x, y, width, height, title, lines, fill)
    for x, y, width, text, fill in STRIPS:
        strip(axes, x, y, width, text, fill)
    for begin, end, label, place, side in FLOWS:
        arrow(axes, begin, end, label, place, side)
    axes.plot([103, 104.2, 104.2, 15.5], [14, 14, 8, 8], color=LINE, lw=1.0)
    axes.text(8, 6.1, "drafts of the next step", size=7.2, color=LINE, va="center")
    axes.plot([67, 67, 75, 75], [57.7, 60, 60, 67], color=LINE, lw=1.0)
    arrow(axes, (31, 46.5), (31, 21.2), "new weights\nafter each\nstep", (30.2, 43), "right", color="#0072B2")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor=FRAME) for fill in LEGEND.values()]
    axes.legend(handles, LEGEND, loc="lower left", bbox_to_anchor=(0.022, 0.39), fontsize=6.8, frameon=False)
    return figure


def draw_engine_step():
    """The order of calls in one step; widths are not to scale."""
    figure, axes = canvas(110, 47)
    lanes = {"scheduler": 38, "model runner": 30, "sampler": 22, "proposer": 14}
    for name, y in lanes.items():
        axes.text(1, y + 2.5, name, weight="bold", va="center")
        axes.plot([12, 109], [y - 0.8, y - 0.8], color="#dddddd", lw=0.8)
    pieces = (
        ("scheduler", 13, 12, "schedule\n1 + drafts tokens", UPSTREAM),
        ("model runner", 26, 24, "execute_model: one forward pass\nover all tokens of the batch", UPSTREAM),
        ("sampler", 51, 17, "_sample: verify drafts,\nsample the next token", RUNTIME),
        ("proposer", 69, 7, "observe\nplan", DOOR),
        ("proposer", 77, 7, "append\ntokens", DOOR),
        ("proposer", 85, 6, "draft", DOOR),
        ("proposer", 92, 7, "choose\nlengths", DOOR),
        ("scheduler", 98, 11, "next step", UPSTREAM),
    )
    for lane, x, width, text, fill in pieces:
        y = lanes[lane]
        axes.add_patch(plt.Rectangle((x, y), width, 5, facecolor=fill, edgecolor=FRAME, lw=0.8))
        axes.text(x + width / 2, y + 2.5, text, ha="center", va="center", size=7.6)
    arrow(axes, (25, 40), (27, 35.2))
    arrow(axes, (50, 32), (52, 27.2), "logits", (53, 30), "left")
    arrow(axes, (68, 24), (70, 19.2), "tokens", (71, 22), "left")
    arrow(axes, (97, 19.1), (101, 37.8), "drafts", (97.8, 28), "right")
    spans = (("other", 13, 25.7), ("forward_ms", 26, 50), ("verify_ms", 51, 68), ("draft_ms", 69, 99))
    for name, begin, end in spans:
        axes.annotate("", (begin, 9.5), (end, 9.5), arrowprops={"arrowstyle": "<->", "color": "#555555", "lw": 0.8})
        axes.text((begin + end) / 2, 8.1, name, ha="center", va="center", size=7.6, color="#555555")
    lines = [
        ("request 1", "drafts  = 7 ;   sampled  = 8", "'=' is accepted, '7' is not: 2 tokens, '= 8'"),
        ("request 2", "no drafts   sampled  4", "1 token, '4'"),
    ]
    axes.text(13, 5.2, "An example:", size=7.6, weight="bold", va="center")
    for y, (name, tokens, outcome) in zip((5.2, 2.4), lines, strict=True):
        axes.text(24, y, name, size=7.6, va="center")
        axes.text(34, y, tokens, size=7.6, va="center", family="monospace")
        axes.text(72, y, outcome, size=7.6, va="center")
    axes.text(69, 12.0, "a switched-off step ends after plan", size=7.0, va="center", color="#555555", style="italic")
    return figure


PICTURES = {"processes": draw_processes, "engine_step": draw_engine_step}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python docs/images/draw.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for the PNG files")
    output = parser.parse_args(arguments).output
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(output / f"{name}.png", dpi=110, pil_kwargs={"optimize": True})
        plt.close(figure)


if __name__ == "__main__":
    main()
