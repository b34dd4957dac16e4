"""Published PyTorch checkpoints -> Flax parameters, without PyTorch."""
