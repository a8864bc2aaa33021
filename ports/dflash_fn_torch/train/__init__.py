"""Training on torch: read `trainer` first, then `forward` and `loss`, then `draft_task` and `target_task`."""
