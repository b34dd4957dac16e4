"""The denoising process: its schedules, its transitions as Gaussians, and the chain of
transitions from noise to a token."""
