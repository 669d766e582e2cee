"""Targets: declare, fetch, check and load the language models to speed up."""
