from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dflash_fn import errors
from dflash_fn.text import KEPT, LIMIT, TextStream, chat_prompt, feed, flush, next_turn

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TINY_CODE = Path(__file__).parent.parent / "dflash_fn" / "zoo" / "pairs" / "tiny-code" / "target"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny_code():
    return transformers.AutoTokenizer.from_pretrained(TINY_CODE)


@pytest.fixture
def chat_tokenizer():
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_CODE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer in Llama's manner: spaces are ▁, the first is dropped, rare bytes are tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "!"]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    inner.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def pieces_of(tokenizer, ids, at_once=1):
    stream, pieces = TextStream(tokenizer), []
    for start in range(0, len(ids), at_once):
        stream, text = feed(stream, ids[start : start + at_once])
        pieces.append(text)
    return [*pieces, flush(stream)]


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def byte_ids(tokenizer, data):
    """The ids of single bytes, spelled as byte-level tokenizers spell them."""
    return [tokenizer.convert_tokens_to_ids(BYTE_LETTERS[byte]) for byte in data]


def byte_letters():
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


BYTE_LETTERS = byte_letters()


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "def f(n):\n    return n\n",
        "naïve café",
        "日本語のテキスト" * 12,
        "👩‍👩‍👧‍👦🎉" * 9,
        "a\ufffdb\ufffd",
        "\ufffd" * 40,
    ],
)
def test_pieces_join_to_the_decoded_text(tiny_code, text, at_once):
    ids = tiny_code.encode(text)
    pieces = pieces_of(tiny_code, ids, at_once)
    assert "".join(pieces) == whole(tiny_code, ids) == text


def test_a_character_comes_out_whole_when_its_last_byte_is_there(tiny_code):
    assert pieces_of(tiny_code, byte_ids(tiny_code, "a🎉b".encode())) == ["a", "", "", "", "🎉", "b", ""]


def test_ascii_is_never_delayed(tiny_code):
    ids = tiny_code.encode("for i in range(10):\n    print(i)\n")
    assert pieces_of(tiny_code, ids) == [*(tiny_code.decode([i]) for i in ids), ""]


def test_a_genuine_replacement_character_comes_out_with_the_next_token(tiny_code):
    ids = byte_ids(tiny_code, "x\ufffdy".encode())
    assert pieces_of(tiny_code, ids) == ["x", "", "", "", "\ufffdy", ""]


def test_half_a_character_at_the_end_comes_out_on_flush(tiny_code):
    ids = byte_ids(tiny_code, b"x\xf0\x9f\x98")
    assert pieces_of(tiny_code, ids) == ["x", "", "", "", "\ufffd"]


def test_a_loop_of_invalid_bytes_is_given_out_at_bounded_cost(tiny_code):
    stream, given = TextStream(tiny_code), 0
    for token in byte_ids(tiny_code, b"\xff") * 500:
        stream, text = feed(stream, [token])
        given += len(text)
        assert len(stream.window) <= LIMIT
    assert given + len(flush(stream)) == 500


def test_windows_stay_short(tiny_code):
    ids = tiny_code.encode("日本語 and ascii 🎉 " * 60)
    stream = TextStream(tiny_code)
    stream, _ = feed(stream, ids[:300])
    assert len(stream.window) == KEPT
    for token in ids[300:]:
        stream, _ = feed(stream, [token])
        assert len(stream.window) <= LIMIT


def test_special_tokens_leave_no_trace(tiny_code):
    ids = tiny_code.encode("a b")
    mixed = [0, ids[0], 0, 1, *ids[1:], *[0] * 100]
    assert "".join(pieces_of(tiny_code, mixed)) == "a b"


def test_streams_are_values(tiny_code):
    first, _ = feed(TextStream(tiny_code), tiny_code.encode("left"))
    assert feed(first, tiny_code.encode(" a"))[1] == " a"
    assert feed(first, tiny_code.encode(" b"))[1] == " b"
    assert feed(first, []) == (first, "")
    with pytest.raises(FrozenInstanceError):
        first.given = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_spaces_between_words_survive_a_decoder_that_strips_the_first(sentencepiece):
    names = ["▁Hello", "▁world", "</s>", "▁world", "▁", "▁Hello", "!"]
    ids = sentencepiece.convert_tokens_to_ids(names)
    assert pieces_of(sentencepiece, ids) == ["Hello", " world", "", " world", " ", " Hello", "!", ""]


def test_a_text_that_goes_on_from_a_prompt_keeps_its_first_space(sentencepiece):
    hello, world = sentencepiece.convert_tokens_to_ids(["▁Hello", "▁world"])
    stream, _ = feed(TextStream(sentencepiece), [hello])
    assert feed(stream, [world])[1] == " world"


def test_long_sentencepiece_texts_join(sentencepiece):
    ids = sentencepiece.convert_tokens_to_ids(["▁"] * 50 + ["▁Hello", "▁", "▁", "lo"] * 30 + ["▁"] * 60)
    assert "".join(pieces_of(sentencepiece, ids)) == whole(sentencepiece, ids)


@pytest.mark.parametrize("tail", [b"", b"\xff"])
def test_a_run_of_byte_tokens_is_judged_as_a_whole(sentencepiece, tail):
    run = [f"<0x{byte:02X}>" for byte in "日本".encode() + tail]
    ids = sentencepiece.convert_tokens_to_ids(["▁Hello", *run, "!"])
    pieces = pieces_of(sentencepiece, ids)
    assert pieces[1:-2] == [""] * len(run)
    assert "".join(pieces) == whole(sentencepiece, ids)


def test_ids_outside_the_tokenizer_decode_to_nothing(tiny_code):
    ids = [*tiny_code.encode("ab"), 5000, *tiny_code.encode("cd")]
    assert "".join(pieces_of(tiny_code, ids)) == whole(tiny_code, ids) == "abcd"


def test_a_tokenizer_that_cleans_up_spaces():
    from tokenizers import Tokenizer, decoders, models

    words = ["[UNK]", "it", "'", "s", ".", "do", "n't", "well", ",", "##ed"]
    inner = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True)
    ids = tokenizer.convert_tokens_to_ids(["it", "'", "s", "well", "##ed", ",", "do", "n't", "well", "."] * 9)
    assert "it's welled, don't well." in whole(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, ids)) == whole(tokenizer, ids)


USER = {"role": "user", "content": "add two numbers"}


def test_chat_prompt_is_the_template_up_to_the_answer(chat_tokenizer):
    ids = chat_prompt(chat_tokenizer, [USER])
    text = "<|im_start|>user\nadd two numbers<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(ids) == text
    assert ids == chat_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)


def conversation(answer):
    return [USER, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("stopped", [True, False])
def test_next_turn_completes_the_template(chat_tokenizer, stopped):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = chat_tokenizer.encode("a + b")
    state = [*chat_prompt(chat_tokenizer, [USER]), *answer, *([end] if stopped else [])]
    ids = next_turn(chat_tokenizer, conversation("a + b"), "thanks", state)
    following = [*conversation("a + b"), {"role": "user", "content": "thanks"}]
    assert state + ids == chat_prompt(chat_tokenizer, following)
    assert (ids[0] == end) is not stopped


@pytest.mark.parametrize("stopped", [True, False])
def test_next_turn_after_an_answer_spelled_in_other_tokens(chat_tokenizer, stopped):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = byte_ids(chat_tokenizer, b"return")
    assert answer != chat_tokenizer.encode("return")
    state = [*chat_prompt(chat_tokenizer, [USER]), *answer, *([end] if stopped else [])]
    ids = next_turn(chat_tokenizer, conversation("return"), "thanks", state)
    following = [*conversation("return"), {"role": "user", "content": "thanks"}]
    assert chat_tokenizer.decode(state + ids) == chat_tokenizer.decode(chat_prompt(chat_tokenizer, following))


def test_next_turn_where_the_template_rewrites_earlier_answers(chat_tokenizer):
    chat_tokenizer.chat_template = CHAT_TEMPLATE.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}")
    answer = "<think>sum</think>a + b"
    state = [*chat_prompt(chat_tokenizer, [USER]), *chat_tokenizer.encode(answer)]
    ids = next_turn(chat_tokenizer, conversation(answer), "thanks", state)
    assert chat_tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"


def test_no_chat_template_is_an_error(tiny_code):
    with pytest.raises(errors.InputError, match="no chat template"):
        chat_prompt(tiny_code, [USER])


def test_a_template_that_refuses_is_an_error(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(errors.InputError, match="refuses these messages: roles must alternate"):
        chat_prompt(chat_tokenizer, [USER])


def test_a_template_that_hides_answers_is_an_error(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(errors.InputError, match="does not show answers"):
        next_turn(chat_tokenizer, conversation("a"), "thanks", [7])


def test_next_turn_needs_an_answer_to_go_on_from(chat_tokenizer):
    with pytest.raises(errors.InputError, match="end with the assistant's"):
        next_turn(chat_tokenizer, [USER], "thanks", [7])
