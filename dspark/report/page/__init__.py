"""The report of a build or package: what there is to tell as data (`tell`), as one HTML file or as Markdown."""

from dspark.report.page.evidence import Evidence, read_evidence
from dspark.report.page.html import render_html
from dspark.report.page.markdown import render_markdown
from dspark.report.page.model import Page
from dspark.report.page.tell import tell

__all__ = ["Evidence", "Page", "read_evidence", "render_html", "render_markdown", "tell"]
