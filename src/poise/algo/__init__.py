"""The maths of the objective: pure functions of tensors that neither normalize, log, nor know ranks."""
