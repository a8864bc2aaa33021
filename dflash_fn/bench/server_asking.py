"""Asking a server many questions, some at a time, with the answers in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from dflash_fn import errors
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.text import Message

__all__ = ["ask_all", "spread"]

Item = TypeVar("Item")
Made = TypeVar("Made")


def ask_all(
    subject: Subject,
    questions: Sequence[Sequence[Message]],
    max_new_tokens: int,
    *,
    told: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """Ask every question, as many at once as the subject takes.

    Args:
        subject: whom to ask.
        questions: conversations, each of which ends with a user's message.
        max_new_tokens: the most tokens to answer one with.
        told: hears of each reply as soon as it is there, in the caller's own thread, with the question's index. What
            it was told is what there is when Ctrl-C ends the call.

    Returns:
        a reply for each question, in the questions' order.
    """
    return spread(lambda question: subject.ask(question, max_new_tokens), questions, subject.concurrency, done=told)


def spread(
    work: Callable[[Item], Made],
    items: Sequence[Item],
    at_once: int,
    *,
    done: Callable[[int, Made], None] | None = None,
) -> list[Made]:
    """Apply a function to every item, several at a time, and return what it made in the items' order.

    One at a time runs in the caller's thread. Several run in threads that do not keep the process alive: Ctrl-C, and an
    error that `work` raises, end the call at once; what is under way is left behind and nothing more is begun.

    Args:
        work: the function.
        items: what to apply it to.
        at_once: how many at a time.
        done: hears of each result as soon as it is there, with its index, in the caller's thread.

    Raises:
        InputError: `at_once` is below 1.

    Example:
        >>> spread(abs, [-3, 4], 2)
        [3, 4]
    """
    if at_once < 1:
        raise errors.InputError(f"at_once: got {at_once}, expected 1 or more")
    made: dict[int, Made] = {}
    for index, result in _one_by_one(work, items) if at_once == 1 else _together(work, items, at_once):
        made[index] = result
        if done is not None:
            done(index, result)
    return [made[index] for index in range(len(items))]


def _one_by_one(work: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[tuple[int, Made]]:
    for index, item in enumerate(items):
        yield index, work(item)


def _together(work: Callable[[Item], Made], items: Sequence[Item], at_once: int) -> Iterator[tuple[int, Made]]:
    waiting: SimpleQueue[tuple[int, Item]] = SimpleQueue()
    results: SimpleQueue[tuple[int, Made | None, BaseException | None]] = SimpleQueue()
    ended = threading.Event()
    for entry in enumerate(items):
        waiting.put(entry)
    for _ in range(min(at_once, len(items))):
        threading.Thread(target=_work_off, args=(work, waiting, results, ended), daemon=True).start()
    try:
        for _ in items:
            index, result, error = results.get()
            if error is not None:
                raise error
            yield index, cast(Made, result)
    finally:
        ended.set()


def _work_off(
    work: Callable[[Item], Made],
    waiting: SimpleQueue[tuple[int, Item]],
    results: SimpleQueue[tuple[int, Made | None, BaseException | None]],
    ended: threading.Event,
) -> None:
    """Take items until there are none or the call has ended."""
    while not ended.is_set():
        try:
            index, item = waiting.get_nowait()
        except Empty:
            return
        try:
            results.put((index, work(item), None))
        except BaseException as error:  # the caller's thread raises it
            results.put((index, None, error))
