"""One response: which tokens were drafts, and where a draft was rejected."""

import pytest

from sam.bench.followed import Token, as_html, decoder, summary, tokens_of

STEPS = [([], [5]), ([6, 9, 8], [6, 7]), ([8, 4], [8, 4, 3]), ([1], [2]), ([], [2])]
TOKENS = [
    Token(5, False, ()), Token(6, True, ()), Token(7, False, (9, 8)), Token(8, True, ()), Token(4, True, ()),
    Token(3, False, ()), Token(2, False, (1,)), Token(2, False, ()),
]  # fmt: skip


def test_each_token_of_each_step():
    assert tokens_of(STEPS, 100) == TOKENS
    assert tokens_of(STEPS, 4) == TOKENS[:4]  # the last draft went beyond the response's end


def test_without_a_tokenizer_ids_are_shown(tmp_path):
    text = as_html(TOKENS, decoder(None))
    assert text == as_html(TOKENS, decoder(tmp_path))
    assert text.startswith("<div class='response'>5 <span class='accepted'>6 </span>")
    assert text.count("class='accepted'") == 3
    assert "<span class='rejected' title='draft: 9 8 '>7 </span>" in text and text.count("class='rejected'") == 2


def test_characters_of_several_tokens_and_of_html(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a<é'").ids
    texts = decoder(tmp_path)(ids)
    assert "".join(texts) == "a<é'" and len(texts) == len(ids) == 5 and "" in texts
    text = as_html([Token(ids[0], True, ()), Token(ids[1], False, (ids[4],))], decoder(tmp_path))
    assert "<span class='rejected' title='draft: &#x27;'>&lt;</span>" in text


def test_long_responses_are_cut():
    text = as_html([Token(1, False, ())] * 1600, decoder(None))
    assert "100 more tokens are not shown" in text and text.count("1 ") == 1500


def test_counts():
    assert "8 tokens of one request. Green: 3 accepted" in summary(TOKENS) and "Underlined: 2 tokens" in summary(TOKENS)
