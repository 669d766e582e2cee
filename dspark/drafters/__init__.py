"""Drafter networks, their heads, their incremental context and every checkpoint dialect, read and write."""
