"""The pages of the reference that are made from the code, by their place in the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import api
import cli
import models

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli.page,
    "reference/api.md": api.page,
    "reference/settings.md": models.settings_page,
    "reference/files.md": models.files_page,
}
