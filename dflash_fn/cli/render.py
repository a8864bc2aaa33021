"""What people see after an answer: plain lines and one small chart, at whatever width the terminal has."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from dflash_fn.cli.answer import Answer
from dflash_fn.cli.check import Check, NotChecked
from dflash_fn.metrics import TAU_DEFINITION, Summary

__all__ = ["NO_DRAFT", "bars", "check_lines", "one_line", "show_answer", "turn_line"]

BAR_WIDTH = 40
"""Characters of the longest bar, where the terminal has the room."""


NO_DRAFT = "no draft: the target decodes alone, one token a step, so tau is 1.00; --draft names one"
"""What people are told where nothing can be sped up."""


def show_answer(console: Console, answer: Answer, *, drafts: bool = True, paced: bool = False) -> None:
    """Print steps, tokens, tau, speed, and how many drafted tokens the steps accepted, or that there is no draft.

    Block sizes are told where they differ, and where `paced` says that they were chosen.
    """
    summary = answer.summary
    if console.is_terminal:
        console.print()
    console.print(Text(one_line(answer)))
    if summary.tau is not None:
        console.print(Text(TAU_DEFINITION if drafts else NO_DRAFT, style="dim"))
    if sizes := block_sizes(answer, paced=paced):
        console.print(Text(f"blocks: {sizes}"))
    if len(summary.histogram) > 1 and summary.steps:
        console.print(Text("steps by drafted tokens accepted:"))
        console.print(bars(summary, width=console.width, letter="#" if console.options.ascii_only else "█"))


def block_sizes(answer: Answer, *, paced: bool = False) -> str:
    """Say how many steps had which block size; "" where all had the same, unless it was chosen."""
    counts = Counter(info.block_size for info in answer.infos if info.step > 0)
    if len(counts) < 2 and not paced:
        return ""
    return ", ".join(f"{counted(steps, 'step')} of {size}" for size, steps in sorted(counts.items()))


def one_line(answer: Answer) -> str:
    """Say in one line what an answer took.

    The speed is that of the tokens after the first; the time to the first is named apart.
    """
    summary = answer.summary
    parts = [counted(summary.num_tokens, "token"), counted(summary.steps, "step")]
    if summary.tau is not None:
        parts.append(f"tau {summary.tau:.2f}")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.ttft_s is not None:
        parts.append(f"first token after {answer.ttft_s:.2f} s")
    return ", ".join(parts)


def turn_line(answer: Answer) -> Text:
    """Return what a chat says of each answer."""
    note = "cut by Ctrl-C; " if answer.interrupted else ""
    return Text(f"[{note}{one_line(answer)}]", style="dim")


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bars(summary: Summary, *, width: int, letter: str) -> Text:
    """Return a line a number of accepted drafted tokens, with a bar as long as it had steps.

    Example:
        >>> summary = Summary(3, 5, (0, 1, 1), 5 / 3, 2 / 3, (1, 2))
        >>> print(bars(summary, width=14, letter="#").plain)
         0 ## 1
         1 #### 2
    """
    most = max(summary.histogram)
    longest = max(1, min(BAR_WIDTH, width - len(f"00  {most}") - 5))
    lines = []
    for accepted, steps in enumerate(summary.histogram):
        bar = letter * max(round(longest * steps / most), steps > 0)
        lines.append(Text(f"{accepted:>2} ").append(bar, style="green").append(f" {steps}" if bar else f"{steps}"))
    return Text("\n").join(lines)


def check_lines(check: Check | NotChecked, num_tokens: int) -> Text:
    """Say whether the draft changed anything but the speed."""
    if isinstance(check, NotChecked):
        return Text(f"check: nothing was checked, because {check.reason}", style="yellow")
    if check.identical:
        count = counted(num_tokens, "token")
        text = Text(f"check: tokens and logits are those without the draft, bit for bit ({count})", style="green")
    else:
        what = "logits differ" if check.tokens_identical else "tokens differ"
        where = f"first at token {check.first_difference} of the answer"
        text = Text(f"check: {what} from those without the draft, {where}", style="bold red")
    if check.speedup is None:
        return text
    plain = f"{check.baseline_tokens_per_s:.1f} tokens/s"
    return Text("\n").join([text, Text(f"speed: {check.speedup:.2f} times that without the draft ({plain})")])
