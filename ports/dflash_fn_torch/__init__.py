"""The torch port: CPU and CUDA, checkpoints in transformers' format. Read `port` first, then `decoder` and `draft`."""
