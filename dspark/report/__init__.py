"""Reports from files on disk only: the model card of a package, gates, and figures as SVG."""

from dspark.report.card import render_card

__all__ = ["render_card"]
