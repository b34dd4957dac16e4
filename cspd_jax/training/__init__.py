"""Training: objectives of images and text, the optimiser, resumable runs."""
