"""Golden traces: what every step of a decode saw and made, to hold another port, or another engine, against.

Reading order: `records` (what a trace holds), `summary` (numbers that ports can compare), `laws` (p and q of the tokens
that matter), `recording` (making one), `files`, `bounds` (how far two right programs may be apart), `comparing` and
`checking` (replaying one, forced along its tokens), `report` (what came of it), `view` (a page to look at). The format
is documented field by field in docs/explanation/trace-format.md.
"""

from dflash_fn.trace.checking import check_trace
from dflash_fn.trace.expecting import expected_by_rule, whole_laws
from dflash_fn.trace.files import read_trace, write_trace
from dflash_fn.trace.recording import record
from dflash_fn.trace.records import CacheView, LawsView, LogitsView, RowStart, RowStep, Trace
from dflash_fn.trace.report import Deviation, Report
from dflash_fn.trace.view import render_page

__all__ = [
    "CacheView",
    "Deviation",
    "LawsView",
    "LogitsView",
    "Report",
    "RowStart",
    "RowStep",
    "Trace",
    "check_trace",
    "expected_by_rule",
    "read_trace",
    "record",
    "render_page",
    "whole_laws",
    "write_trace",
]
