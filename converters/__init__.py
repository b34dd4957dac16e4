"""Published PyTorch checkpoints -> Flax parameters, without PyTorch. One module per format."""
