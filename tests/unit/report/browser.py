"""A real browser without a screen: what a page's own script finds in it, what it logs, and a picture.

No driver and no debugging port: a probe is added to a copy of the page, with its digest in the page's policy, and what
it writes into the document is read from the browser's dump of it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
    "--enable-logging=stderr", "--virtual-time-budget=2000",
)  # fmt: skip
NARROWEST, HEIGHT = 500, 1600  # of a window
_CONSOLE = re.compile(r":CONSOLE[:(]\S*\s*(.*)")


def executable() -> str | None:
    """The browser, or None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def probed(page: str, script: str) -> str:
    """The page with one script more at its end, whose result stands in an attribute of the root element."""
    probe = f"""
    const result = JSON.stringify((() => {{{script}}})());
    document.documentElement.setAttribute("data-found", result);
    if (parent !== window) parent.postMessage(result, "*");
    """
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    changed = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return changed.replace("</body>", f"<script>{probe}</script></body>", 1)


def visit(page: Path, *, width: int, dark: bool = False, picture: Path | None = None) -> tuple[str, list[str]]:
    """Open a file.

    Args:
        width: of the view in pixels. Windows cannot be as narrow as a phone, so below 500 pixels the page stands in a
            frame of that width; the dump is then of the page around it, and has what the probe found.
        picture: where a PNG goes, instead of the dump.
    Returns:
        the document as it is afterwards, and what was logged on the console.
    """
    browser = executable()
    assert browser is not None
    if width < NARROWEST:
        page = _framed(page, width)
    # blink's preferred colour scheme: 0 is dark, 1 is light
    size = f"--window-size={max(width, NARROWEST)},{HEIGHT}"
    flags = [*_FLAGS, size, f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    with tempfile.TemporaryDirectory() as profile:
        what = f"--screenshot={picture}" if picture is not None else "--dump-dom"
        command = [browser, *flags, f"--user-data-dir={profile}", what, page.absolute().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, _CONSOLE.findall(done.stderr)


def found(dump: str) -> Any:
    """What the probe wrote."""
    match = re.search(r'<html[^>]* data-found="([^"]*)"', dump)
    assert match is not None, f"the probe did not run: {dump[:300]}"
    return json.loads(html.unescape(match[1]))


def _framed(page: Path, width: int) -> Path:
    around = page.with_name("around.html")
    around.write_text(
        '<!doctype html><html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        "<script>addEventListener('message', (one) => document.documentElement.setAttribute('data-found', one.data));"
        f'</script><body style="margin:0"><iframe src="{page.name}" width="{width}" height="{HEIGHT}" '
        'style="border:0;display:block"></iframe></body></html>'
    )
    return around
