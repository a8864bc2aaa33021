"""How many tokens a server's steps emitted, where it tells.

| server | of one request | of all together |
| --- | --- | --- |
| vLLM | `metrics.speculative_decoding` (0.32 and later, by a flag) | counters in `/metrics` |
| SGLang | `sglext.spec_tokens_details`, which is asked for | mean in `/server_info` |
| llama.cpp | `timings`: `draft_n`, `draft_n_accepted` | none |

vLLM's flag is `--per-request-spec-decode-metrics detailed`; `dflash-fn serve-command vllm` has it.

Source:
    vLLM's documentation page "Per-Request Acceptance Metrics" (0.32 to 0.33) and its counters
    `vllm:spec_decode_num_drafts_total` and `vllm:spec_decode_num_accepted_tokens_total`; SGLang 0.5.23,
    `srt/entrypoints/openai/protocol.py` (SpecTokensDetails) and `avg_spec_accept_length` in `internal_states` of
    `/server_info` (its older name is `/get_server_info`); the answers of llama.cpp's `llama-server`.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ASKS", "steps_of", "watching"]

ASKS: dict[str, dict[str, Any]] = {"sglang": {"return_spec_tokens_details": True}}
"""What a request must hold, by kind of server, so that its answer tells of steps."""

COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)(?:_total)?(?:\{[^}]*\})? +([0-9.eE+]+)", re.M)
PATIENCE = 5.0
"""Seconds to wait for counters, which are no part of what is measured."""


def steps_of(answer: Mapping[str, Any]) -> tuple[tuple[int, ...], int | None]:
    """Read what an answer, or a piece of one, tells of its steps.

    Returns:
        how many tokens each step emitted, in an order of their own where the server counts by size; empty where it
        tells totals alone. And how many steps there were; None where it does not tell.

    Example:
        >>> steps_of({"metrics": {"speculative_decoding": {"acceptance_histogram": [2, 0, 1], "num_spec_steps": 3}}})
        ((1, 1, 3), 3)
        >>> steps_of({"timings": {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}})
        ((), 6)
    """
    told = _table(_table(answer, "metrics"), "speculative_decoding")
    if told:
        return _vllm(told)
    told = _table(_table(answer, "sglext"), "spec_tokens_details")
    if told:
        return _counted(told.get("spec_correct_drafts_histogram"), told.get("spec_verify_ct"))
    told = _table(answer, "timings")
    if told.get("draft_n") and isinstance(told.get("predicted_n"), int):
        # the first token comes from the prompt; every step after it emits one more than it accepts
        return (), max(told["predicted_n"] - 1 - int(told.get("draft_n_accepted") or 0), 0)
    return (), None


def _table(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = holder.get(key)
    return value if isinstance(value, Mapping) else {}


def _vllm(told: Mapping[str, Any]) -> tuple[tuple[int, ...], int | None]:
    each = told.get("per_step_accepted")
    if isinstance(each, Sequence) and not isinstance(each, str):
        return tuple(int(accepted) + 1 for accepted in each), len(each)
    return _counted(told.get("acceptance_histogram"), told.get("num_spec_steps"))


def _counted(histogram: Any, steps: Any) -> tuple[tuple[int, ...], int | None]:
    counts = histogram if isinstance(histogram, Sequence) and not isinstance(histogram, str) else ()
    emitted = tuple(accepted + 1 for accepted, count in enumerate(counts) for _ in range(int(count)))
    return emitted, len(emitted) or (int(steps) if steps else None)


def watching(root: str, kind: str | None, api_key: str | None = None) -> Callable[[], float | None]:
    """Note the server's own counters, and return a function that gives tau of what was decoded since.

    Of SGLang it is the mean since the server was started: it keeps no counters. None where a server tells nothing.
    """
    if kind == "sglang":
        return lambda: _sglang_mean(root, api_key)
    before = _vllm_counters(root, api_key) if kind == "vllm" else None

    def after() -> float | None:
        now = _vllm_counters(root, api_key) if before is not None else None
        if before is None or now is None or now[0] <= before[0]:
            return None
        return 1.0 + (now[1] - before[1]) / (now[0] - before[0])

    return after


def _vllm_counters(root: str, api_key: str | None) -> tuple[float, float] | None:
    """Return steps and accepted tokens of all engines together; None where the server does not speculate."""
    text = _get(f"{root}/metrics", api_key)
    found = COUNTER.findall(text or "")
    sums = [sum(float(value) for name, value in found if name == kind) for kind in ("drafts", "accepted_tokens")]
    return (sums[0], sums[1]) if found else None


def _sglang_mean(root: str, api_key: str | None) -> float | None:
    text = _get(f"{root}/server_info", api_key) or _get(f"{root}/get_server_info", api_key)
    try:
        states = json.loads(text or "{}").get("internal_states", [])
        means = [float(state["avg_spec_accept_length"]) for state in states if "avg_spec_accept_length" in state]
    except (ValueError, AttributeError, TypeError):
        return None
    return sum(means) / len(means) if means else None


def _get(url: str, api_key: str | None) -> str | None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE) as answer:
            return answer.read().decode("utf-8", errors="replace")
    except (OSError, urllib.error.URLError, ValueError):
        return None
