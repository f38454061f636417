"""Several paths: a tree with one leaf is the product's draft, and no path is counted that the text did not take."""

import json

import numpy as np
import pytest

from sam.automaton.store import add_group, blocks_for, make_store, reserve
from sam.drafting.batch import append
from sam.drafting.drafter import Drafter
from sam.drafting.mixing_weights import make_learned
from sam.drafting.paths.forks import grow, make_tree
from sam.drafting.prompt_memory import make_memory
from sam.drafting.sequences import make_sequences, start_sequence
from sam.jit import compiled
from sam.record.responses import Recording
from sam.replay.__main__ import main
from sam.replay.paths import known_siblings, paths_table, play_group, product_memory, score
from sam.replay.round_robin import Replay, replay, replay_group


def texts(seed, count, length, tokens=6):
    """Text that often has two continuations."""
    rng = np.random.default_rng(seed)
    jumps = [np.where(rng.random(length) < 0.7, 1, rng.integers(1, 3, length)) for _ in range(count)]
    return [(np.cumsum(jump) % tokens + 1).astype(np.int32) for jump in jumps]


PROMPT = np.array([1, 2, 3], np.int32)


@compiled
def grow_at(store, memory, learned, sequences, slot, tree, paths, most_tokens, depth):
    grow(store, memory, learned, sequences, slot, tree, paths, most_tokens, depth)


def tree_after(text, paths, most_tokens, depth):
    """The tree that grows at the end of a text: (token, parent, path, depth) of its tokens, and probabilities."""
    learned, sequences, store = make_learned(), make_sequences(1, depth), make_store(blocks_for(len(text)))
    memory = make_memory(0)
    start_sequence(sequences, 0, 0, add_group(store, 0), text[:0], 0)
    reserve(store, 0, len(text))
    append(store, memory, learned, sequences, 0, text, 0, len(text))
    tree = make_tree(paths, most_tokens)
    grow_at(store, memory, learned, sequences, 0, tree, paths, most_tokens, depth)
    return tree.nodes[1 : tree.sizes[0]]


class Advances(Replay):
    """Notes each step: its position, drafted, accepted and advanced tokens."""

    def __init__(self):
        super().__init__(4)
        self.rows = []

    def count(self, position, acceptance, accepted, advanced):
        super().count(position, acceptance, accepted, advanced)
        self.rows.append((position, len(acceptance), accepted, advanced, *acceptance))


def one_path(prompts, known, cross_prompt):
    """Steps of trees with one path, one prompt after the other: as the rows of Advances."""
    learned, memory, rows = make_learned(), product_memory(cross_prompt), []
    for prompt, samples in prompts:
        steps = play_group(learned, memory, prompt, samples[1 : known + 1], samples[:1], (1, 4, 4))
        for i, length in enumerate(steps.lengths[:, 0].tolist()):
            counts = steps.position[i], length, steps.accepted[i, 0], steps.advanced[i]
            rows.append((*map(int, counts), *steps.acceptance[i, 0, :length]))
    return rows


def product(prompts, known, cross_prompt):
    """The same of sam.replay with the product's drafter."""
    drafter, result = Drafter(max_draft_tokens=4, cross_prompt=cross_prompt), Advances()
    for number, (prompt, samples) in enumerate(prompts):
        for i, text in enumerate(samples[1 : known + 1]):
            drafter.start(f"{number}, {i}", prompt)
            drafter.append([f"{number}, {i}"], text, np.array([0, len(text)]))
        replay_group(result, [drafter], str(number), prompt, samples[:1], "turns")
    return result.rows


@pytest.mark.parametrize("known", [0, 1, 3])
def test_one_path_is_what_the_product_drafts(known):
    """Step by step, over three prompts, with and without the memory of other prompts, which changes the drafts."""
    prompts = [(np.arange(1, 4 + seed, dtype=np.int32), texts(seed, 4, 300, tokens=30)) for seed in range(3)]
    rows = {cross_prompt: one_path(prompts, known, cross_prompt) for cross_prompt in (True, False)}
    for cross_prompt, steps in rows.items():
        assert steps == product(prompts, known, cross_prompt)
    assert rows[True] != rows[False]


def test_another_prompts_continuation_is_a_path():
    """The text's own last two tokens were never continued in the group, but twofold in other prompts."""
    learned, memory = make_learned(), make_memory(1 << 20)
    for number, following in enumerate((8, 9)):
        sample = np.array([6, 7, following], np.int32)
        play_group(learned, memory, PROMPT + 20 * number, [], [sample], (1, 1, 1))
    steps = play_group(learned, memory, PROMPT, [], [np.array([6, 7, 9], np.int32)], (2, 2, 1))
    assert steps.lengths[-1].tolist() == [1, 1]
    alone = play_group(make_learned(), make_memory(0), PROMPT, [], [np.array([6, 7, 9], np.int32)], (2, 2, 1))
    assert alone.lengths[-1].tolist() == [0, 0]


def test_turns_and_at_once_are_the_orders_of_replay():
    samples = texts(1, 4, 300)
    recording = Recording([PROMPT], [samples])
    for at_once, order in ((False, "turns"), (True, "engine")):
        steps = play_group(make_learned(), product_memory(), PROMPT, [], samples, (1, 3, 3), at_once)
        result = replay(recording, lambda: Drafter(max_draft_tokens=3), 3, order=order)
        assert (len(steps.advanced), int(steps.accepted.sum())) == (result.steps, result.accepted)


def test_a_fork_begins_where_the_text_had_two_continuations():
    text = np.array([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], np.int32)
    tree = tree_after(text, 2, 4, 2)
    assert {(int(node["token"]), int(node["depth"])) for node in tree if node["depth"] == 1} == {(3, 1), (4, 1)}
    # The latest continuation comes first, as in the product.
    assert tree[0]["token"] == 4 and tree["path"].max() == 1
    assert tree_after(text, 1, 4, 4)["path"].max() == 0


@pytest.mark.parametrize("paths", [1, 2, 4])
@pytest.mark.parametrize("most_tokens, depth", [(4, 4), (16, 4), (5, 2)])
def test_a_tree_keeps_its_limits_and_adds_the_most_probable_edge(paths, most_tokens, depth):
    for seed in range(20):
        tree = tree_after(texts(seed, 1, 150)[0], paths, most_tokens, depth)
        assert len(tree) <= most_tokens and len(np.unique(tree["path"])) <= paths
        assert len(tree) == 0 or tree["depth"].max() <= depth
        parents = np.concatenate([[1.0], tree["probability"]])[tree["parent"]]
        assert np.all(tree["probability"] <= parents)
        children = {(int(node["parent"]), int(node["token"])) for node in tree}
        assert len(children) == len(tree)  # no token twice
        # With room for every fork an edge is added only when no likelier one is left.
        if len(tree) and len(np.unique(tree["path"])) < paths:
            assert np.all(np.diff(tree["probability"]) <= 1e-12)


def test_further_paths_bring_tokens_at_equal_depth_and_cost_more():
    recording = Recording([PROMPT], [texts(2, 4, 500)])
    rows = [score(recording, 1, 2, (paths, 4 * paths, 4), lambda tokens: None) for paths in (1, 2, 4)]
    lengths = [row["mean_acceptance_length"] for row in rows]
    assert lengths == sorted(set(lengths))
    tree, separate = [row["tree_tokens"] for row in rows], [row["row_tokens"] for row in rows]
    assert tree == sorted(set(tree)) and separate[0] == tree[0] and separate[1] > tree[1]
    assert 0 < rows[1]["right"] < 1 and abs(rows[1]["right"] - rows[1]["predicted"]) < 0.1


def test_what_is_accepted_is_the_path_that_the_text_took():
    sample = texts(3, 1, 400)[0]
    steps = play_group(make_learned(), product_memory(), PROMPT, [], [sample], (4, 12, 3))
    end = steps.position + steps.advanced
    assert end[-1] == len(sample) and np.array_equal(steps.position[1:], end[:-1])
    assert np.array_equal(np.minimum(steps.accepted.max(axis=1) + 1, len(sample) - steps.position), steps.advanced)
    assert np.all(steps.accepted <= steps.lengths) and np.all(steps.shared <= steps.lengths)
    # The text takes one path through the tree: no token of it is counted on two paths.
    own = np.maximum(0, steps.accepted - steps.shared)
    assert np.array_equal(own.sum(axis=1), steps.accepted.max(axis=1))
    assert own[:, 1:].any()
    drafted = np.arange(3) < steps.lengths[:, :, None]
    assert np.all((steps.acceptance > 0) == drafted)
    assert np.all(np.diff(steps.acceptance, axis=2) <= 1e-6)


def test_levels_are_those_that_most_prompts_have_samples_for():
    samples = texts(4, 6, 10)
    assert known_siblings(Recording([PROMPT] * 2, [samples, samples[:2]])) == [0, 1]
    assert known_siblings(Recording([PROMPT], [samples])) == [0, 1, 5]


def test_command_prints_a_table_beside_seers(tmp_path, capsys):
    path = tmp_path / "trace.npz"
    samples = texts(5, 3, 60)
    np.savez(
        path, prompt_tokens=PROMPT, prompt_offsets=np.array([0, 3]), response_tokens=np.concatenate(samples),
        response_offsets=np.arange(4) * 60, response_prompt=np.zeros(3, int),
    )  # fmt: skip
    assert main(["--traces", str(path), "--paths", "1", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["known"], row["paths"], row["equal"]) for row in rows} == {
        (known, paths, equal) for known in (0, 1) for paths in (1, 2) for equal in ("tokens", "depth")
    }
    shown = paths_table(rows).splitlines()
    assert [line.split()[:3] for line in shown[-2:]] == [["Seer,", "table", "2"]] * 2
    assert shown[-1].split()[-2] == "2.69"
    with pytest.raises(SystemExit):
        main(["--traces", str(path), "--paths", "0"])
    assert "--paths 0" in capsys.readouterr().err
