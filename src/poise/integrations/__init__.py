"""poise's kernels inside other people's trainers: Transformers (so TRL too) and verl."""
