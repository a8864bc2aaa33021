"""Training drafts, and the small targets of the zoo. Read `options` and `stages` first, then `fitting` and `trainer`.

The core decides what is done, in which order, and what is kept; a port (`dflash_fn.train.trainer`) computes.
"""
