"""Asking: every way answers each question before the next one, and each reply is there as soon as it is whole."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.clock import reset_peaks
from dflash_fn.bench.contenders import LEAD
from dflash_fn.bench.questions import Question
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.text import Message

__all__ = ["WARM_UP", "Key", "Record", "ask_all", "lead_of", "warm_up"]

WARM_UP = 32
"""Tokens of the first question that every way decodes beforehand: a first run pays for what later ones find warm."""

Key = tuple[str, int, str]
"""Question, turn, way."""


@dataclass(frozen=True, slots=True)
class Record:
    """A reply, and what it is a reply to.

    Attributes:
        question: its name.
        turn: 0 for the first.
        way: who answered.
        reply: the answer, or why there is none.
        begun: when it was asked, in seconds since 1970.
        memory: the most memory that was held meanwhile, in GB; None where nobody counts it.
    """

    question: str
    turn: int
    way: str
    reply: Reply
    begun: float
    memory: float | None = None

    @property
    def key(self) -> Key:
        """What no other record of a run has."""
        return self.question, self.turn, self.way


def lead_of(ways: Iterable[str]) -> str:
    """Return whose answers a conversation goes on from: `plain`, or the first where it is not there."""
    ways = list(ways)
    return LEAD if LEAD in ways else ways[0]


def warm_up(subjects: Sequence[Subject], questions: Sequence[Question], max_new_tokens: int) -> None:
    """Let every way answer the start of a question, and drop it. What goes wrong there will go wrong again, and told.

    A server is asked as many at once as later.
    """
    messages = [{"role": "user", "content": questions[0].turns[0]}]
    count = min(WARM_UP, max_new_tokens)
    for subject in subjects:
        threads = [threading.Thread(target=subject.ask, args=(messages, count), daemon=True)
                   for _ in range(subject.concurrency - 1)]  # fmt: skip
        for thread in threads:
            thread.start()
        subject.ask(messages, count)
        for thread in threads:
            thread.join()


def ask_all(
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    known: Mapping[Key, Record] | None = None,
    peak: Callable[[], float] | None = None,
) -> Iterator[Record]:
    """Ask, and yield each record as soon as it is there.

    The later turns of a conversation follow the answer of the lead way (`lead_of`), the same for all, so that all
    answer the same questions.

    Args:
        subjects: the ways; one that is asked several questions at once must be alone.
        questions: what to ask.
        max_new_tokens: the most tokens of an answer.
        known: records of an earlier run; those without an error are yielded as they are, and not asked again.
        peak: returns the most memory held (`Port.peak_memory`); None where nothing is to be measured.

    Raises:
        InputError: several ways, and one that is asked several questions at once.
    """
    if len(subjects) > 1 and any(subject.concurrency > 1 for subject in subjects):
        raise errors.InputError("concurrency: got several ways, of which one is asked several questions at once")
    whole = {key: record for key, record in (known or {}).items() if record.reply.error is None}
    job = _Job(subjects, max_new_tokens, whole, peak)
    if subjects[0].concurrency > 1:
        yield from _at_once(job, questions, subjects[0].concurrency)
        return
    for question in questions:
        yield from job.hold(question)


@dataclass(frozen=True, slots=True)
class _Job:
    subjects: Sequence[Subject]
    max_new_tokens: int
    known: Mapping[Key, Record]
    peak: Callable[[], float] | None

    def hold(self, question: Question) -> Iterator[Record]:
        """Hold one conversation with every way."""
        lead, messages, lost = lead_of(subject.name for subject in self.subjects), [], ""
        for turn, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            answer = None
            for subject in self.subjects:
                record = self._record((question.name, turn, subject.name), subject, messages, lost)
                yield record
                answer = record.reply if subject.name == lead else answer
            assert answer is not None
            messages.append({"role": "assistant", "content": answer.text})
            if answer.error is not None and not lost:
                lost = f"turn {turn + 1} has no answer by {lead} to go on from"

    def _record(self, key: Key, subject: Subject, messages: Sequence[Message], lost: str) -> Record:
        if key in self.known:
            return self.known[key]
        begun = time.time()
        if lost:
            return Record(*key, Reply("", 0, 0.0, error=lost), begun)
        if self.peak is not None:
            reset_peaks()
        reply = subject.ask(list(messages), self.max_new_tokens)
        return Record(*key, reply, begun, self.peak() if self.peak is not None else None)


def _at_once(job: _Job, questions: Sequence[Question], concurrency: int) -> Iterator[Record]:
    """Hold several conversations at once. Threads are daemons: Ctrl-C does not wait for what is under way."""
    waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
    done: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)
    over, left = threading.Event(), min(concurrency, len(questions))
    for _ in range(left):
        threading.Thread(target=_work, args=(job, waiting, done, over), daemon=True).start()
    try:
        while left:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        over.set()


def _work(job: _Job, waiting: Any, done: Any, over: threading.Event) -> None:
    """Hold one waiting conversation after another; None says that there are no more."""
    try:
        while not over.is_set():
            for record in job.hold(waiting.get_nowait()):
                done.put(record)
    except queue.Empty:
        pass
    except BaseException as error:  # raised again by the thread that reads the records
        done.put(error)
    done.put(None)
