"""Grammars, by xgrammar, which the extra `grammar` installs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.checks import check_row_counts, of_row
from dflash_fn.constraints.penalties import Skip
from dflash_fn.policies import Constraint

__all__ = ["grammar"]


def grammar(compiled: Any, *, skip: Skip = 0) -> Constraint:
    """Let only such tokens be emitted as keep the answer within a grammar, and a stop token where it may end.

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=pair.target.spec.vocab_size)
        json = xgrammar.GrammarCompiler(info).compile_builtin_json_grammar()
        policy = constrained(match(), grammar(json, skip=len(prompt)))

    Tokens after the one that ended the answer are left alone; so the stop tokens of `decode` should be among the
    grammar's. A text that has left the grammar already leaves no token to emit, which is an error in `decode`.
    Threads may share one constraint: what it remembers of earlier calls is each thread's own.

    Args:
        compiled: an `xgrammar.CompiledGrammar`, made for the pair's tokenizer and the target's vocabulary size.
        skip: how many of a row's first tokens are not the grammar's business: those of the prompt.

    Raises:
        BackendMissing: xgrammar is not installed.
        InputError: what is no compiled grammar, a skip below 0; when called, a grammar of another vocabulary size, or
            no skip for a row.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise errors.BackendMissing(
            f"grammar: xgrammar cannot be imported ({error}); pip install 'dflash-fn[grammar]'"
        ) from error
    if not isinstance(compiled, xgrammar.CompiledGrammar):
        raise errors.InputError(
            f"grammar: got {type(compiled).__name__}, expected an xgrammar.CompiledGrammar, as a GrammarCompiler makes"
        )
    skip, known, memory = check_row_counts("grammar: skip", skip), compiled.tokenizer_info.vocab_size, _Memory()

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        first = of_row("grammar: skip", skip, row)
        if len(logits) != known:
            raise errors.InputError(
                f"grammar: got a grammar compiled for {known} token ids, expected {len(logits)}, the target's; make "
                "its TokenizerInfo with vocab_size=pair.target.spec.vocab_size"
            )
        if row not in memory.paths:
            memory.paths[row] = _Path(xgrammar.GrammarMatcher(compiled))
        path = memory.paths[row]
        if not path.follow(tokens[first:]):
            return np.full_like(logits, -np.inf)
        if path.matcher.is_terminated():
            return logits
        words = xgrammar.allocate_token_bitmask(1, len(logits))
        path.matcher.fill_next_token_bitmask(words)
        bits = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")[: len(logits)]
        return np.where(bits == 1, logits, np.float32(-np.inf))

    return constraint


class _Memory(threading.local):
    """A thread's matchers by row: a matcher is moved along a text, which two threads must not do at once."""

    def __init__(self) -> None:
        self.paths: dict[int, _Path] = {}


class _Path:
    """A matcher and the tokens that it has read: memory of earlier calls, which changes no answer."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.read: list[int] = []

    def follow(self, tokens: tuple[int, ...]) -> bool:
        """Bring the matcher to these tokens, from the longest part that it has read already; whether it takes them."""
        shared = 0
        for one, other in zip(self.read, tokens, strict=False):
            if one != other:
                break
            shared += 1
        if len(self.read) > shared:
            self.matcher.rollback(len(self.read) - shared)
            del self.read[shared:]
        for token in tokens[shared:]:
            if self.matcher.is_terminated():
                return True
            if not self.matcher.accept_token(token):
                return False
            self.read.append(token)
        return True
