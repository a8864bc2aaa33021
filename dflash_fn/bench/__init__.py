"""Benchmarks and long proofs, each a module to run: `python -m dflash_fn.bench.NAME --help`.

`contract` decodes with and without drafts and compares bits, `speed` compares ways of decoding, `verification`
compares one verification with its matrix products alone, `start` splits the time to the first token. They measure
other people's code too, so they may import it, inside the functions that do.
"""
