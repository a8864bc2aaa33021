"""Benchmarks and long proofs.

`dflash-fn bench` asks several ways of decoding the same questions; from here it can be had in Python. Reading order:
`replies` (the records) · `questions` · `contenders` (names of the ways) · `clock` · `engines` (other people's) ·
`subjects` (a pair in this process) · `asking` · `figures` · `tables`, `plots` · `reply_files` · `ranks`. `ways` and
`compare` are what `dflash-fn compare` uses, `policy_runs` and `estimates` what `policies compare` does.

The others are modules to run, `python -m dflash_fn.bench.NAME --help`: `contract` decodes with and without drafts and
compares bits, `verification` compares one verification with its matrix products alone, `start` splits the time to the
first token. They measure other people's code too, so they may import it, inside the functions that do.
"""

from dflash_fn.bench.asking import Record, ask_all, warm_up
from dflash_fn.bench.contenders import Contender, contenders, parse_ways
from dflash_fn.bench.figures import Figures, figures_of
from dflash_fn.bench.questions import Question, read_questions, shortened
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.bench.reply_files import ReplyFolder
from dflash_fn.bench.subjects import Manner, open_subject, open_subjects
from dflash_fn.bench.tables import as_markdown, failures

__all__ = [
    "Contender",
    "Figures",
    "Manner",
    "Question",
    "Record",
    "Reply",
    "ReplyFolder",
    "Subject",
    "as_markdown",
    "ask_all",
    "contenders",
    "failures",
    "figures_of",
    "open_subject",
    "open_subjects",
    "parse_ways",
    "read_questions",
    "shortened",
    "warm_up",
]
