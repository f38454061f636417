"""`python -m tests.yardsticks --output FILE [NAMES]`: what a rebuilding of this project must leave as it is.

`tokens`: a digest of every token of the engine matrix. `replay`: acceptance length, and microseconds a token, on
recordings. `configs`: every config as it is composed. `router`: the decisions of 400 schedules. `--compare BEFORE
AFTER` prints what differs: tokens, configs and decisions at all, acceptance by more than 0.01, times as ratios. How
fast an engine and a run are beside stock vLLM `sam bench` and scripts/quickstart.sh measure.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
ACCEPTANCE = 0.01
SCHEDULES = 400
REPEATS = 5


def digest(value) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


def tokens(_) -> Iterator[tuple[str, str]]:
    """Of requests whose end no step decides: neither aborted nor ended by a stop string."""
    from tests.sam.engine import async_cpu, matrix

    rows = [row for row in range(matrix.REQUESTS) if row not in matrix.GONE and not matrix.has_stop_string(row)]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        async_cpu.install(monkeypatch)
        matrix.environment(monkeypatch)
        model = matrix.save(Path(folder))
        for ranks in (1, 2):
            for method in ("off", "sam", "ngram"):
                for is_asynchronous in (False, True) if method != "ngram" else (False,):
                    with matrix.engine(model, method, is_asynchronous, ranks) as engine:
                        answers = matrix.run(engine)
                    name = f"{method}, {'asynchronous' if is_asynchronous else 'synchronous'}, {ranks} ranks"
                    yield name, digest([answers[row].tokens for row in rows])


def replay(options) -> Iterator[tuple[str, dict]]:
    """Costs are medians of some passes."""
    from sam.record.responses import read_recording
    from sam.tools.replay import make_drafter, measure_cost
    from sam.tools.replay import replay as replayed

    for path in sorted(options.traces.glob("*.npz")):
        recording = read_recording(path)
        for k in (3, 8):
            for scope in ("request", "group", "history"):
                make = partial(make_drafter, "sam", scope, k)
                epochs = "kept" if scope == "history" else "together"
                if scope == "history" and len({epoch for epochs in recording.epochs or [] for epoch in epochs}) < 2:
                    continue
                length = replayed(recording, make, k, epochs=epochs).summary()["mean_acceptance_length"]
                passes = [measure_cost(recording, make, k)["us_per_token"] for _ in range(REPEATS)]
                yield f"{path.stem}, k {k}, {scope}", {"acceptance": length, "us": statistics.median(passes)}


def configs(_) -> Iterator[tuple[str, dict]]:
    """Every key with its value, with and without speculation."""
    from omegaconf import OmegaConf

    from recipe.sam_dapo.launch.config import compose_config

    for path in sorted((ROOT / "configs").glob("dapo_*.yaml")):
        for method in ("sam", "off"):
            composed = compose_config(path.stem, [f"speculation={method}"])
            yield f"{path.stem}, {method}", dict(_leaves(OmegaConf.to_container(composed)))


def _leaves(node, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, str(node).replace(str(ROOT), "")


def router(_) -> Iterator[tuple[str, str]]:
    """The order in which requests start, by random arrivals, ends and deaths."""
    from tests.sam.routing.schedule import World, play

    chance, starts = np.random.default_rng(0), []
    for _ in range(SCHEDULES):
        sizes = [(int(tokens), int(slots)) for tokens, slots in chance.integers((60, 1), (400, 9), (3, 2))]
        world = World(int(chance.integers(4, 30)) if chance.random() < 0.5 else None, sizes)
        play(world, chance.integers(0, 256, 200, dtype=np.uint8).tobytes())
        world.drain()
        starts.append(world.starts)
    yield f"{SCHEDULES} schedules", digest(starts)


YARDSTICKS = {one.__name__: one for one in (tokens, replay, configs, router)}


def differences(before: dict, after: dict) -> Iterator[str]:
    """A line each; times are told always."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name}: only {'after' if old is None else 'before'}"
        elif isinstance(old, dict) and ("us" in old or "acceptance" in old):
            if abs(new.get("acceptance", 0.0) - old.get("acceptance", 0.0)) > ACCEPTANCE:
                yield f"{name}: acceptance length {old['acceptance']} -> {new['acceptance']}"
            if "us" in old:
                yield f"{name}: {new['us'] / old['us']:.3f}x of the time"
        elif isinstance(old, dict):
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            yield from (f"{name}: {key}: {old.get(key)} -> {new.get(key)}" for key in keys)
        elif old != new:
            yield f"{name}: {old} -> {new}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.yardsticks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*YARDSTICKS, []], help="default: all")
    parser.add_argument("--output", type=Path, help="JSON; what it holds of other names stays")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces", help="folder of recordings, .npz")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.compare)
        lines = [line for name in before.keys() & after.keys() for line in differences(before[name], after[name])]
        print("\n".join(lines) or "no difference")
        return 0
    found = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    for name in options.names or YARDSTICKS:
        found[name] = {}
        for what, value in YARDSTICKS[name](options):
            found[name][what] = value
            print(name, what, json.dumps(value) if len(str(value)) < 200 else f"{len(value)} values", flush=True)
            if options.output:
                options.output.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
