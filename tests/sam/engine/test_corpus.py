"""Engines that read a corpus when they start draft from it, and emit the same tokens."""

import json

import pytest

from tests.sam.engine.tiny_engine import Engine, assert_same

pytestmark = pytest.mark.engine


def test_drafts_come_from_a_corpus_and_tokens_are_equal(model, off, tmp_path):
    """The corpus has these very responses, to a prompt that nobody asks."""
    rows = [{"prompt_tokens": [200], "response_tokens": list(tokens)} for tokens in off.tokens]
    (path := tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    accepted = []
    for corpus in ((), (str(path),)):
        with Engine(model, "sam", speculation={"policy": "always", "corpus": corpus}) as engine:
            found = engine.generate()
        assert_same(found, off)
        accepted.append(found.accepted)
    assert accepted[1] > 1.5 * accepted[0] > 0
