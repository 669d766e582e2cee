"""Profiling: what an engine's steps cost on this machine, and the fingerprint that says which machine that is."""
