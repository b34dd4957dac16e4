"""Training: resumable runs, the optimiser, and the objectives of image and text
models."""
