"""The training objectives of image models."""
