"""Streaming text against decoding all at once: T01 to T03."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_fn.text import LIMIT, TextStream, feed, flush

transformers = pytest.importorskip("transformers")

TINY_CODE = Path(__file__).parent.parent / "dflash_fn" / "zoo" / "pairs" / "tiny-code" / "target"
TOKENIZER = transformers.AutoTokenizer.from_pretrained(TINY_CODE)

ids = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=120)
byte_runs = st.binary(max_size=60).map(lambda data: [int(byte) + 2 for byte in data])
texts = st.text(st.characters(codec="utf-8"), max_size=60)
cuts = st.lists(st.integers(1, 9), max_size=200)


def stream(tokens, sizes):
    """Yield (stream, piece, tokens fed so far) of a list fed in chunks of these sizes."""
    now, start = TextStream(TOKENIZER), 0
    for size in [*sizes, *[1] * len(tokens)]:
        if start >= len(tokens):
            break
        now, piece = feed(now, tokens[start : start + size])
        start += size
        yield now, piece, tokens[:start]


def joined(tokens, sizes):
    steps = list(stream(tokens, sizes))
    last = steps[-1][0] if steps else TextStream(TOKENIZER)
    return "".join(piece for _, piece, _ in steps) + flush(last)


@given(texts, cuts)
def test_t01_pieces_of_an_encoded_text_join_to_the_text(text, sizes):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert joined(tokens, sizes) == TOKENIZER.decode(tokens, skip_special_tokens=True) == text


@given(st.one_of(ids, byte_runs), cuts)
def test_t02_pieces_of_any_tokens_join_to_their_decoding(tokens, sizes):
    assert joined(tokens, sizes) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.one_of(ids, byte_runs, texts.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))), cuts)
def test_t03_what_was_given_out_is_a_beginning_of_every_longer_decoding(tokens, sizes):
    final, given_out = TOKENIZER.decode(tokens, skip_special_tokens=True), ""
    for now, piece, _ in stream(tokens, sizes):
        given_out += piece
        assert final.startswith(given_out)
        assert len(now.window) <= LIMIT + max([*sizes, 1])
