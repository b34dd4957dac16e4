"""Measures how good images are: FID and its relatives, equality of two samples,
words."""
