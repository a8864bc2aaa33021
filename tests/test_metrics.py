from dflash_fn.metrics import TAU_DEFINITION, summarize
from dflash_fn.records import StepInfo


def info(step, block_size, *counts):
    """A step in which each row accepted so many drafted tokens; None for a row that had stopped."""
    emitted = tuple(() if count is None else tuple(range(count + 1)) for count in counts)
    drafted = tuple(tuple(range(block_size - 1)) for _ in counts)
    return StepInfo(step, block_size, drafted, emitted, counts, None)


OPENING = info(0, 1, 0, 0)


def test_two_rows_of_two_steps_together():
    summary = summarize([info(1, 4, 3, 1), info(2, 4, 2, 0)], row=None)
    assert summary.num_accepted == (3, 1, 2, 0)
    assert summary.mean_accepted == 1.5
    assert summary.tau == 2.5
    assert summary.histogram == (1, 1, 1, 1)


def test_one_row_a_time():
    infos = [info(1, 4, 3, 1), info(2, 4, 2, 0)]
    first, second = summarize(infos), summarize(infos, row=1)
    assert (first.num_accepted, first.tau, first.histogram) == ((3, 2), 3.5, (0, 0, 1, 1))
    assert (second.num_accepted, second.tau, second.histogram) == ((1, 0), 1.5, (1, 1, 0, 0))


def test_opening_step_counts_in_tokens_alone():
    summary = summarize([OPENING, info(1, 4, 3, 1)])
    assert summary.steps == 1
    assert summary.num_tokens == 5
    assert summary.num_accepted == (3,)
    assert summary.tau == 4.0


def test_histogram_is_as_long_as_the_block_and_sums_to_the_steps():
    summary = summarize([OPENING, *(info(step, 8, step % 3, 0) for step in range(1, 12))])
    assert len(summary.histogram) == 8
    assert sum(summary.histogram) == summary.steps == 11


def test_a_row_that_had_stopped_counts_no_step():
    summary = summarize([OPENING, info(1, 4, 2, 1), info(2, 4, None, 3)])
    assert (summary.steps, summary.num_tokens, summary.tau) == (1, 4, 3.0)


def test_no_steps_have_no_mean():
    for infos in ([], [OPENING]):
        summary = summarize(infos)
        assert summary.steps == 0
        assert summary.tau is None
        assert summary.mean_accepted is None
        assert sum(summary.histogram) == 0


def test_plain_decoding_has_tau_one():
    summary = summarize([OPENING, info(1, 1, 0, 0), info(2, 1, 0, 0)])
    assert (summary.tau, summary.mean_accepted, summary.histogram) == (1.0, 0.0, (2,))


def test_an_answer_after_extend_has_an_opening_step_of_its_own():
    summary = summarize([OPENING, info(1, 4, 3, 0), OPENING, info(1, 4, 1, 0)])
    assert (summary.steps, summary.num_tokens, summary.num_accepted) == (2, 8, (3, 1))


def test_statistics_of_many_steps_are_exact():
    summary = summarize([info(step, 16, 15) for step in range(1, 1001)])
    assert summary.tau == 16.0


def test_the_definition_says_what_is_computed():
    assert TAU_DEFINITION == "tau = mean tokens emitted per step (accepted drafted tokens + 1)"
