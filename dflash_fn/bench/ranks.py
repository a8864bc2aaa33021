"""Several processes under `torchrun`: each asks its share of the questions, the first puts all together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_fn import errors

__all__ = ["World", "joined"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class World:
    """Where a process stands among others; alone, rank 0 of 1.

    Attributes:
        rank: its number.
        size: of the world.
        local: its number on its machine, by which it takes a GPU.
        local_size: how many processes that machine has.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    local_size: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read what `torchrun` says; a process that it did not start is alone.

        Raises:
            InputError: numbers that make no sense.
        """
        told = os.environ if environment is None else environment
        if "RANK" not in told or "WORLD_SIZE" not in told:
            return cls()
        try:
            rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
            made = cls(rank, size, int(told.get("LOCAL_RANK", "0")), int(told.get("LOCAL_WORLD_SIZE", "1")))
        except ValueError:
            made = cls(-1, 0)
        if not 0 <= made.rank < made.size:
            raise errors.InputError(
                f"RANK={told['RANK']} and WORLD_SIZE={told['WORLD_SIZE']}: expected a rank below the size; start the "
                "processes by torchrun, or unset both"
            )
        return made

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    def device(self, device: str | None) -> str | None:
        """Return the device of this process: of `cuda` the one with its local number."""
        return f"cuda:{self.local}" if device == "cuda" and not self.alone else device

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return every `size`-th item, from `rank` on."""
        return list(items[self.rank :: self.size])

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank, in the first process; [] in the others."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found)
        return found or []

    def wait(self) -> None:
        """Wait until everybody is here."""
        if not self.alone:
            import torch.distributed as dist

            dist.barrier()


@contextmanager
def joined(world: World, device: str | None = None) -> Iterator[World]:
    """Join the others for as long as the block runs: by nccl where each process has a GPU, else by gloo.

    Raises:
        BackendMissing: torch, which the processes talk by, is not installed.
    """
    if world.alone:
        yield world
        return
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise errors.BackendMissing(
            f"several processes need torch to talk to each other; run: {errors.install_line('torch')}"
        ) from None
    wanted = (device or "cuda").startswith("cuda") and dist.is_nccl_available()
    on_gpu = wanted and torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size
    if on_gpu:
        torch.cuda.set_device(world.local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield world
    finally:
        dist.destroy_process_group()
