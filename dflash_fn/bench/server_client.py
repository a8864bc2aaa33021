"""Reaching a server that speaks the OpenAI API: its address, its model, what kind of server it is, what went wrong.

The client is the `openai` package. It is kept by the API's own authors, keeps the fields that servers add to the API,
and has the three things that a measurement needs: no retries where none are wanted, a limit for connecting, and one
for the time between two bytes. All that it brings in beyond what the ports need already is a JSON parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dflash_fn import errors

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

__all__ = ["CONNECT", "STALL", "Malformed", "Server", "explain_failure", "object_of", "open_client", "told"]

CONNECT = 10.0
"""Seconds to wait for a connection."""

STALL = 120.0
"""Seconds without data after which a server counts as stalled. A long prompt is read in silence."""

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
"""How servers say in their list of models which kind they are (`owned_by`)."""


CHOOSE = "name one by --model (in Python, and in a way of compare, model=NAME)"

KINDS = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}


class Malformed(Exception):
    """An answer in a form that the API does not have; the message says where."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has answered once.

    Attributes:
        url: its address with the API's prefix, such as `http://127.0.0.1:8000/v1`.
        root: its address without it, where counters are.
        model: whom to ask.
        kind: `vllm`, `sglang` or `llama.cpp`; None for any other.
        client: to ask with.
        stall: seconds without data after which it counts as stalled.
        api_key: that it wants, if any.
    """

    url: str
    root: str
    model: str
    kind: str | None
    client: OpenAI
    stall: float
    api_key: str | None = None


def open_client(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    connect: float = CONNECT,
    stall: float = STALL,
) -> Server:
    """Connect, and find out which models there are.

    Args:
        url: the server's address, with or without `/v1`.
        model: whom to ask; None takes the only one.
        api_key: for servers that want one.
        connect: seconds to wait for a connection.
        stall: seconds without data after which the server counts as stalled.

    Raises:
        InputError: no address, or a model is to be named.
        BackendMissing: the package `openai` is not installed.
        ServerError: nobody answers, or not with a list of models.
    """
    root, full = _addresses(url)
    try:
        import openai
    except ImportError:
        raise errors.BackendMissing(
            f"the package openai, which asks servers, is not installed; run: {errors.install_line('openai')}"
        ) from None
    limits = openai.Timeout(stall, connect=connect)
    client = openai.OpenAI(base_url=full, api_key=api_key or "none", timeout=limits, max_retries=0)
    try:
        listed = _listed(client)
    except Exception as error:  # whatever the client meets in an answer of no known form
        fatal = openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError
        if model is None or isinstance(error, fatal):
            advice = "" if isinstance(error, openai.APIError) else f"; or {CHOOSE}"
            raise errors.ServerError(explain_failure(error, f"{full}/models", stall) + advice) from error
        listed = []  # a server may do without a list; mlx-lm's breaks where there is no folder of downloads
    chosen = model or _only_model(full, listed)
    return Server(full, root, chosen, _kind(listed), client, stall, api_key)


def _listed(client: OpenAI) -> list[Mapping[str, Any]]:
    entries: Any = object_of(client.models.list(), "the list of models").get("data")
    if not isinstance(entries, list | type(None)):
        raise Malformed(f"data of the list of models is {_kind_of(entries)}, expected a list")
    return [object_of(entry, "an entry of the list of models") for entry in entries or ()]


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return what the client read as a dictionary.

    Raises:
        Malformed: it is no JSON object; `what` names it.
    """
    if not isinstance(value, Mapping) and not hasattr(value, "to_dict"):
        raise Malformed(f"{what} is {_kind_of(value)}, expected an object")
    return value if isinstance(value, Mapping) else value.to_dict(warnings=False)


def _kind_of(value: Any) -> str:
    return KINDS.get(type(value), "an object")


def _addresses(url: str) -> tuple[str, str]:
    """Return the address without and with the API's prefix."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise errors.InputError(f"url: got {url!r}, expected an address such as http://127.0.0.1:8000")
    root = url.rstrip("/").removesuffix("/v1")
    return root, f"{root}/v1"


def _only_model(url: str, listed: Sequence[Mapping[str, Any]]) -> str:
    names = [str(entry["id"]) for entry in listed if entry.get("id")]
    if len(names) != 1:
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "none"
        raise errors.InputError(f"{url}: the server lists {len(names)} models ({found}); {CHOOSE}")
    return names[0]


def _kind(listed: Sequence[Mapping[str, Any]]) -> str | None:
    owners = [OWNERS.get(str(entry.get("owned_by", ""))) for entry in listed]
    return next((owner for owner in owners if owner), None)


def explain_failure(error: Exception, url: str, stall: float) -> str:
    """Say what went wrong with one request, where, and what to do about it."""
    import openai

    if isinstance(error, openai.APIConnectionError):  # which a stall is too
        cause = _innermost(error)
        if any(type(one).__name__ in ("ConnectError", "ConnectTimeout") for one in _causes(error)):
            return f"{url}: no connection ({_words(cause)}); is the server running, and is this its address?"
        if isinstance(error, openai.APITimeoutError):
            return _stalled(url, stall)
        return f"{url}: the connection broke ({_words(cause)}); the server may have died, look at its log"
    if isinstance(error, openai.APIStatusError):
        return f"{url}: the server answered {error.status_code} ({told(error)}); look at its log"
    if isinstance(error, openai.APIError):
        return f"{url}: the server reports an error ({' '.join(str(error.message).split())[:200]}); look at its log"
    if isinstance(error, TimeoutError):
        return _stalled(url, stall)
    what = "its parts are not those of the API"  # Python's own words for what it misses in them tell a user nothing
    if isinstance(error, json.JSONDecodeError):
        what = f"no JSON: {error}"
    elif not isinstance(error, AttributeError | TypeError | LookupError):
        what = " ".join(str(error).split())[:120] or type(error).__name__
    return f"{url}: the answer is none of the OpenAI API ({what}); is this the right address?"


def _stalled(url: str, stall: float) -> str:
    return f"{url}: the server stalled, with no data for {stall:g} s; look at its log, or allow it more time"


def told(error: APIStatusError) -> str:
    """Return what a server wrote of its refusal."""
    body: Any = error.body
    body = body.get("error", body) if isinstance(body, Mapping) else body
    said = body.get("message") or body.get("detail") or body if isinstance(body, Mapping) else body
    return " ".join(str(said or "nothing more").split())[:200]


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _innermost(error: BaseException) -> BaseException:
    return list(_causes(error))[-1]


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
