"""Every error that the library raises on purpose, one class a kind.

Each message says what was got, what was expected and what to do, and names the row or the port where that
matters. All of them are `DflashError`s; those about a caller's value are `ValueError`s too, so that code which
knows nothing of this library still catches what it expects. The command line prints the message alone and exits
with code 2.
"""

__all__ = [
    "BackendMissing",
    "CacheFolderError",
    "CheckpointError",
    "ConfigError",
    "DflashError",
    "DownloadError",
    "HiddenSizeMismatch",
    "InputError",
    "MaskTokenMismatch",
    "NonFiniteError",
    "PairMismatch",
    "PortError",
    "ServerError",
    "StateFileError",
    "TappedLayerMismatch",
    "TargetLayersMismatch",
    "TokenizerMismatch",
    "TrainingDiverged",
    "UnknownPort",
    "UnsupportedModel",
    "VocabularyMismatch",
    "install_line",
]


class DflashError(Exception):
    """Base of all errors that the library raises on purpose."""


class InputError(DflashError, ValueError):
    """A prompt, token id, width, block size, budget or option that cannot be used."""


class ConfigError(DflashError, ValueError):
    """A config.json that lacks a key or holds a value that makes no sense; the message names the key."""


class UnsupportedModel(ConfigError):
    """A config.json that is well formed but describes something that no code here runs."""


class CheckpointError(DflashError, ValueError):
    """A weight file that is missing, truncated or corrupt, or whose tensors do not fit its config."""


class PairMismatch(DflashError, ValueError):
    """Target and draft, each fine alone, do not fit each other."""


class HiddenSizeMismatch(PairMismatch):
    """The draft's hidden size is not the target's, whose embedding and head it uses."""


class VocabularyMismatch(PairMismatch):
    """The draft's vocabulary is not the target's."""


class TappedLayerMismatch(PairMismatch):
    """The draft taps a layer that the target does not have."""


class TargetLayersMismatch(PairMismatch):
    """The draft was trained for a target of another depth."""


class MaskTokenMismatch(PairMismatch):
    """The draft's mask token has no row in the target's embedding."""


class TokenizerMismatch(PairMismatch):
    """The tokenizer is not the one that the weights were trained with."""


class PortError(DflashError):
    """A port cannot do what was asked of it."""


class UnknownPort(PortError, ValueError):
    """No installed package registers a port of that name."""


class BackendMissing(PortError, ImportError):
    """The port is known, but the array library that it runs on is not installed."""


class DownloadError(DflashError, OSError):
    """A file that must be fetched could not be, or is not the one that was expected."""


class ServerError(DflashError, OSError):
    """A server that cannot be reached, refuses what it is asked, or answers with something else."""


class CacheFolderError(DflashError, OSError):
    """The cache folder cannot be written: no space, no permission."""


class StateFileError(DflashError, ValueError):
    """A saved state or trace that is damaged, of another pair, or in a newer format."""


class NonFiniteError(DflashError, ArithmeticError):
    """A model produced NaN or infinity, so its tokens mean nothing."""


class TrainingDiverged(DflashError, ArithmeticError):
    """A training whose loss is finite and grows and grows."""


def install_line(extra: str) -> str:
    """Return the command that installs what an extra needs, from a package index and from a checkout.

    Example:
        >>> install_line("mlx")
        'pip install "dflash-fn[mlx]" (in a checkout: pip install ".[mlx]")'
    """
    return f'pip install "dflash-fn[{extra}]" (in a checkout: pip install ".[{extra}]")'
