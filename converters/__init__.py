"""Converts published PyTorch checkpoints to Flax parameters, without PyTorch."""
