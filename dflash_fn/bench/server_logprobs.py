"""What the forms in which servers give log probabilities say, as token ids and `Glimpse`s.

* Lists beside each other (`tokens`, `token_logprobs`, `top_logprobs`): the API's completions, vLLM, SGLang. Tokens are
  texts, or `token_id:N` on request.
* A list of entries (`content`): the API's chat completions, llama.cpp, mlx-lm. Tokens are texts, and an `id` where the
  server adds it.

Text names a token only where no other token reads the same, so ids are asked for wherever a server can give them.

Source:
    The OpenAI API's two forms; vLLM's `return_tokens_as_token_ids` and `return_token_ids`; SGLang 0.5.23's
    `return_token_ids`; the server of mlx-lm 0.32.2, which calls an entry after the first of its best tokens, and those
    are in no order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_fn.glimpses import Glimpse

__all__ = ["Names", "read_choice"]

PREFIX = "token_id:"


class Names:
    """Finds tokens by what a server calls them.

    Args:
        tokenizer: the target's.
        size: of the vocabulary.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.known: dict[str, int | None] | None = None

    def token(self, name: Any, given: Any = None) -> int | None:
        """Return a token's id; None where its text does not tell."""
        if isinstance(given, int):
            return given
        if not isinstance(name, str):
            return None
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal():
            return int(name.removeprefix(PREFIX))
        if self.known is None:
            self.known = self._texts()
        return self.known.get(name)

    def _texts(self) -> dict[str, int | None]:
        """Read the text of every token; None for what several read."""
        texts: dict[str, int | None] = {}
        for token in range(min(self.size, len(self.tokenizer))):
            text = self.tokenizer.decode([token])
            texts[text] = None if text in texts else token
        return texts

    def reads(self, tokens: Sequence[int], text: str) -> bool:
        """Whether tokens have a text, but for space around it, which some servers drop."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True).strip() == text.strip()


def read_choice(choice: Mapping[str, Any], text: str, names: Names) -> list[Glimpse] | None:
    """Read a choice's tokens and their rows.

    Args:
        choice: of an answer that was not streamed.
        text: that it gives.
        names: to find tokens by.

    Returns:
        a glimpse for each token; None where the tokens are not told, or not such that they read as the text does.
    """
    entries = list(_entries(choice.get("logprobs"), names))
    values = [{token: value for token, value in best if token is not None} for _, best in entries]
    listed = [token for token, _ in entries]
    told = choice.get("token_ids")
    if isinstance(told, Sequence) and all(isinstance(token, int) for token in told):
        values = values if len(values) == len(told) else [{} for _ in told]
        return [Glimpse(token, row) for token, row in zip(told, values, strict=True)]
    best = [max(row, key=lambda token: (row[token], -token)) if row else None for row in values]  # first of equals
    for tokens in (listed, best):
        certain = [token for token in tokens if token is not None]
        if certain and len(certain) == len(tokens) and (listed == best or names.reads(certain, text)):
            return [Glimpse(token, row) for token, row in zip(certain, values, strict=True)]
    return None


def _entries(told: Any, names: Names) -> Iterator[tuple[int | None, list[tuple[int | None, float]]]]:
    """Yield each position's token, and the log probabilities that are told there."""
    if not isinstance(told, Mapping):
        return
    if isinstance(told.get("content"), Sequence):
        for entry in told["content"]:
            token = names.token(entry.get("token"), entry.get("id"))
            best = [entry, *(entry.get("top_logprobs") or ())]
            yield token, [(names.token(one.get("token"), one.get("id")), float(one["logprob"])) for one in best]
        return
    lists = (told.get("tokens") or (), told.get("token_logprobs") or (), told.get("top_logprobs") or ())
    for place, (name, value) in enumerate(zip(lists[0], lists[1], strict=False)):
        best = lists[2][place] if place < len(lists[2]) else None
        token = names.token(name)
        yield token, [(token, float(value)), *((names.token(one), float(at)) for one, at in (best or {}).items())]
