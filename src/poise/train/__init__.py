"""From trajectories to new weights: packing, the optimizer step, checkpoints."""
