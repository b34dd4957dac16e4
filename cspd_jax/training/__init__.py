"""Training: runs that can be resumed, the optimiser, and the objectives of image and
text models."""
