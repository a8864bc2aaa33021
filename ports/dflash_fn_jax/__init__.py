"""The jax port: a numerics reference on the CPU, one token at a time. Read `port` first, then `decoder` and `draft`."""
