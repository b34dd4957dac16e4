"""Small helpers that all packages of the library use."""
