"""Training: MAR's objective, the optimiser, resumable runs."""
