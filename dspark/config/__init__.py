"""Typed settings and how they are resolved: flag > environment > workspace YAML > built-in default."""
