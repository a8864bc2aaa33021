"""A picture of compared policies, by matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.estimates import Estimate
from dflash_fn.bench.policy_runs import Result
from dflash_fn.metrics import TAU_DEFINITION

__all__ = ["FORMATS", "check_plot", "plot"]

FORMATS = (".png", ".svg")
"""How the name of a picture may end."""
MARKERS = "osD^vPX*"


def check_plot(path: str) -> None:
    """Raise an error where no picture can be made, before anything is computed for it.

    Raises:
        InputError: another format.
        BackendMissing: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise errors.InputError(f"--plot {path}: expected a name that ends with {' or '.join(FORMATS)}")
    _figure()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.BackendMissing(
            f"--plot needs matplotlib, which is not installed; run: {errors.install_line('plot')}"
        ) from None
    return Figure


def plot(results: Sequence[Result], title: str, path: str) -> None:
    """Draw tau, what was kept by slot, and the distance from the target's law, with their intervals, into a file.

    Raises:
        BackendMissing: matplotlib is not installed.
        CacheFolderError: the file cannot be written.
    """
    figure = _figure()(figsize=(11, 0.4 * len(results) + 5), layout="constrained")
    axes = figure.subplot_mosaic([["tau", "slots", "slots"], ["divergence", "surprise", "time"]])
    for name, (values, words) in _points_of(results).items():
        _points(axes[name], results, values, names=name in ("tau", "divergence"))
        axes[name].set(title=name, xlabel=words)
    axes["surprise"].axvline(0, color="0.6", linewidth=1)
    axes["divergence"].set_xlim(-0.02, 1.02)
    _slots(axes["slots"], results)
    figure.suptitle(f"{title}\n{TAU_DEFINITION}; bars: intervals of 95 %", fontsize="small")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise errors.CacheFolderError(f"--plot {path}: cannot be written ({error.strerror or error})") from None


def _points_of(results: Sequence[Result]) -> dict[str, tuple[list[Estimate | None], str]]:
    return {
        "tau": ([one.tau for one in results], "tokens a step"),
        "divergence": ([one.divergence for one in results], "total variation from the target's law"),
        "surprise": ([one.surprise for one in results], "nats a token; 0 under the target's law"),
        "time": ([one.seconds for one in results], "seconds a step"),
    }


def _points(axes: Any, results: Sequence[Result], values: Sequence[Any], *, names: bool) -> None:
    for index, (one, value) in enumerate(zip(results, values, strict=True)):
        if value is not None:
            filled = "full" if one.contender.policy.lossless else "none"
            axes.errorbar(value.value, -index, xerr=_bars([value]), marker=MARKERS[index % len(MARKERS)], capsize=3,
                          color=f"C{index}", fillstyle=filled)  # fmt: skip
    axes.set_yticks([-index for index in range(len(results))])
    axes.set_yticklabels([_label(one) for one in results] if names else [])
    axes.margins(y=0.15)
    axes.grid(axis="x", alpha=0.3)


def _bars(values: Sequence[Estimate]) -> list[list[float]]:
    """Return how far each interval reaches below its value, and above it."""
    ends = [(value.value, value.ends or (value.value, value.value)) for value in values]
    return [[at - low for at, (low, _) in ends], [high - at for at, (_, high) in ends]]


def _label(one: Result) -> str:
    return one.contender.name + ("" if one.contender.policy.lossless else " (lossy)")


def _slots(axes: Any, results: Sequence[Result]) -> None:
    for index, one in enumerate(results):
        known = [(slot, value) for slot, value in enumerate(one.by_slot, start=1) if value is not None]
        axes.errorbar([slot for slot, _ in known], [value.value for _, value in known],
                      yerr=_bars([value for _, value in known]), marker=MARKERS[index % len(MARKERS)], capsize=2,
                      color=f"C{index}", fillstyle="full" if one.contender.policy.lossless else "none",
                      label=_label(one))  # fmt: skip
    axes.set(title="kept, by slot", xlabel="slot after the anchor", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    if results:
        axes.legend(fontsize="x-small")
