"""Checks of what callers hand in, one function at a time; no model is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_fn import errors, inputs
from dflash_fn.checks import check_count


class Words:
    """A tokenizer of words `w3 w7`, which may begin a text with token 1."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [int(word[1:]) for word in text.split()]


def pair_of(*, tokenizer: Any = None, vocab: int = 10, context: int = 8, block: int = 4, width: int = 16) -> Any:
    spec = SimpleNamespace(vocab_size=vocab, max_context=context, eos_token_ids=(2, 5))
    return SimpleNamespace(
        target=SimpleNamespace(spec=spec),
        block_size=block,
        port=SimpleNamespace(max_width=width),
        tokenizer=tokenizer,
    )


def message(act: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(errors.InputError) as caught:
        act(*arguments, **options)
    return str(caught.value)


# --- prompts ---


@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        ([3], ((3,),)),
        ([3, 4], ((3, 4),)),
        ((3, 4), ((3, 4),)),
        ([[3, 4]], ((3, 4),)),
        ([[3], (4, 5), []], ((3,), (4, 5), ())),
        ("w3 w4", ((1, 3, 4),)),
        (["w3", "w4 w5"], ((1, 3), (1, 4, 5))),
        (["w3", [4]], ((1, 3), (4,))),
        ("", ((1,),)),
        (np.array([3, 9]), ((3, 9),)),
        (np.array([[3], [9]], dtype=np.uint8), ((3,), (9,))),
        (range(3), ((0, 1, 2),)),
    ],
)
def test_prompts_become_rows_of_ids(prompts: Any, rows: Any) -> None:
    found = inputs.as_rows(pair_of(tokenizer=Words()), prompts)
    assert found == rows
    assert all(type(token) is int for row in found for token in row)


def test_text_goes_through_the_tokenizer_with_or_without_its_special_tokens() -> None:
    pair = pair_of(tokenizer=Words())
    assert inputs.as_rows(pair, ["w3", "w4"], special=False) == ((3,), (4,))


@pytest.mark.parametrize("token", [-1, 10, 2**70, True, False, 1.0, "3", None, [3]])
@pytest.mark.parametrize("row", [0, 1])
def test_an_id_that_the_target_does_not_have(token: Any, row: int) -> None:
    prompts: list[Any] = [[3], [3]]
    prompts[row] = [3, 4, token]
    expected = f"row {row}, token 2: got {token!r}, expected an id from 0 to 9"
    assert message(inputs.as_rows, pair_of(), prompts) == expected


def test_a_tokenizer_with_more_words_than_the_target() -> None:
    expected = "row 0, token 2: got 12, expected an id from 0 to 9"
    assert message(inputs.as_rows, pair_of(tokenizer=Words()), "w3 w12") == expected


def test_no_rows() -> None:
    assert inputs.as_rows(pair_of(), []) == ()
    assert message(inputs.check_fit, pair_of(), ()) == "prompts: got none, expected at least one row"


def test_text_without_a_tokenizer() -> None:
    expected = "row 1: got text, but the pair has no tokenizer; give token ids"
    assert message(inputs.as_rows, pair_of(), [[3], "w3"]) == expected


def test_rows_must_fit_the_context_and_leave_room_for_a_token() -> None:
    inputs.check_fit(pair_of(), [[1], [1] * 7])
    assert message(inputs.check_fit, pair_of(), [[1], []]) == (
        "row 1: the prompt is empty; expected at least one token"
    )
    assert message(inputs.check_fit, pair_of(), [[1], [1] * 8]) == (
        "row 1: the prompt has 8 tokens; the target's context holds 8, one of which must be left for an answer"
    )


# --- seeds, stops, sizes ---


@pytest.mark.parametrize(
    ("seed", "rows", "seeds"),
    [
        (0, 2, (0, 0)),
        (2**64 - 1, 1, (2**64 - 1,)),
        ([3, 4], 2, (3, 4)),
        (np.uint64(7), 1, (7,)),
        (range(3), 3, (0, 1, 2)),
    ],
)
def test_seeds(seed: Any, rows: int, seeds: tuple[int, ...]) -> None:
    found = inputs.as_seeds(seed, rows)
    assert found == seeds
    assert all(type(value) is int for value in found)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (-1, "seed: got -1, expected an integer from 0 to 18446744073709551615"),
        ([0, 2**64], "seed: got 18446744073709551616, expected an integer from 0 to 18446744073709551615"),
        ([1], "seed: got 1 seeds for 2 rows; expected one, or one a row"),
        ([], "seed: got 0 seeds for 2 rows; expected one, or one a row"),
        ([1, 2, 3], "seed: got 3 seeds for 2 rows; expected one, or one a row"),
        ([1, 2.0], "seed: got 2.0, expected an integer"),
        (True, "seed: got True, expected an integer"),
    ],
)
def test_seeds_that_make_no_sense(seed: Any, expected: str) -> None:
    assert message(inputs.as_seeds, seed, 2) == expected


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (None, {2, 5}),
        ((), set()),
        (3, {3}),
        ([3, 4, 3], {3, 4}),
        (np.int64(3), {3}),
        ({0, 9}, {0, 9}),
        (range(2), {0, 1}),
    ],
)
def test_stop_ids(given: Any, ids: set[int]) -> None:
    assert inputs.as_stop_ids(pair_of(), given) == ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (10, "stop_token_ids: got 10, expected an integer from 0 to 9"),
        ([3, -1], "stop_token_ids: got -1, expected an integer from 0 to 9"),
        ([3, "4"], "stop_token_ids: got '4', expected an integer"),
        (True, "stop_token_ids: got True, expected an integer"),
    ],
)
def test_stop_ids_that_make_no_sense(given: Any, expected: str) -> None:
    assert message(inputs.as_stop_ids, pair_of(), given) == expected


def test_the_width_is_the_drafts_block_size_unless_another_is_given() -> None:
    assert inputs.check_width(pair_of(), None) == 4
    assert inputs.check_width(pair_of(), 16) == 16
    assert inputs.check_width(pair_of(), 1) == 1


@pytest.mark.parametrize("width", [0, -3, 17])
def test_a_width_out_of_range(width: int) -> None:
    expected = f"width: got {width}, expected an integer from 1 to 16"
    assert message(inputs.check_width, pair_of(), width) == expected


def test_a_draft_that_is_wider_than_its_port_can_verify() -> None:
    expected = "width: got 32, expected an integer from 1 to 16"
    assert message(inputs.check_width, pair_of(block=32), None) == expected


def test_the_block_size_is_the_drafts_unless_another_is_given() -> None:
    assert inputs.check_block_size(pair_of(), None, 4) == 4
    assert inputs.check_block_size(pair_of(), 1, 4) == 1


def test_a_block_size_above_the_width_names_both_ways_out() -> None:
    assert message(inputs.check_block_size, pair_of(), None, 3) == (
        "block_size 4 is above the state's width 3; prefill with width=4 or more, or decode with block_size=3 or less"
    )


@pytest.mark.parametrize("value", [0, 5, np.int32(3)])
def test_counts_become_ints(value: Any) -> None:
    assert type(check_count("n", value, least=0)) is int


@pytest.mark.parametrize(
    ("value", "limits", "expected"),
    [
        (-1, {"least": 0}, "n: got -1, expected an integer of at least 0"),
        (3, {"least": 0, "most": 2}, "n: got 3, expected an integer from 0 to 2"),
        (1.0, {"least": 0}, "n: got 1.0, expected an integer"),
        (None, {"least": 0}, "n: got None, expected an integer"),
        (np.bool_(True), {"least": 0}, "n: got np.True_, expected an integer"),
    ],
)
def test_counts_that_make_no_sense(value: Any, limits: dict[str, int], expected: str) -> None:
    assert message(check_count, "n", value, **limits) == expected
