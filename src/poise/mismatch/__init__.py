"""How far the engine's log-probabilities are from the trainer's, where, and why: ``poise mismatch``."""
