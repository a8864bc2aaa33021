"""The mlx port: Apple silicon, and the CPU build on Linux; checkpoints in transformers' and in mlx-lm's format.

Read `port` first, then `decoder` and `draft`; `dflash_fn_torch` has the same files and functions.
"""
