"""The processes that share a model: the mesh that a caller hands over, or one that is made for `torchrun`."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dflash_fn import errors
from dflash_fn.config import DecoderSpec, TargetSpec
from dflash_fn_torch.sharding import Share, check_shares

__all__ = ["share_of"]


def share_of(mesh: object, *specs: DecoderSpec) -> Share:
    """Return the share that this process has of models.

    Args:
        mesh: of all processes in one dimension; or how many there are, where `torchrun` has started them, and then
            they talk by nccl where there is CUDA, else by gloo.
        specs: of the models.

    Raises:
        InputError: no mesh; one of another shape or size; or models that cannot be shared out equally.
    """
    if isinstance(mesh, bool) or not isinstance(mesh, int | DeviceMesh):
        raise errors.InputError(
            f"mesh: got an object of type {type(mesh).__name__}, expected a torch DeviceMesh, or a number of processes"
        )
    share = Share(_checked(mesh) if isinstance(mesh, DeviceMesh) else _started(mesh))
    for spec in specs:
        check_shares("target" if isinstance(spec, TargetSpec) else "draft", spec, share.count)
    return share


def _checked(mesh: DeviceMesh) -> DeviceMesh:
    world = dist.get_world_size()
    if mesh.ndim != 1 or mesh.size() != world:
        raise errors.InputError(
            f"mesh: got one of shape {list(mesh.shape)} among {world} processes; every process is to hold one share, "
            f"give init_device_mesh({mesh.device_type!r}, ({world},))"
        )
    return mesh


def _started(count: int) -> DeviceMesh:
    """Make a mesh of the processes that there are, which must be as many as were asked for."""
    mine = not dist.is_initialized()
    world = int(os.environ.get("WORLD_SIZE", "1")) if mine else dist.get_world_size()
    if world != count or (mine and "WORLD_SIZE" not in os.environ):
        raise errors.InputError(
            f"tensor parallel: asked for {count} processes, and this is one of {world}; "
            f"start {max(count, 1)} of them: torchrun --nproc-per-node {max(count, 1)} ..."
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (count,))
    if mine:
        atexit.register(dist.destroy_process_group)
    return mesh
