"""Programs around the library: each is one file that calls its public functions."""
