"""Reports from JSON on disk only: here the model card of a package."""

from dspark.report.card import render_card

__all__ = ["render_card"]
