"""Measures how good images are: by FID and related scores, by tests whether two samples
have the same distribution, and by the share of right words."""
