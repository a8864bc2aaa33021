"""The torch port: CPU and CUDA, checkpoints in transformers' format. Read `port` first, then `decoder` and `draft`."""

from dflash_fn_torch.generate import custom_generate

__all__ = ["custom_generate"]
