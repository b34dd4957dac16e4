"""The denoising process: schedules, transitions as Gaussians, and the chain from noise
to a token."""
