"""Reports, pictures and citations of a run."""
