from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # shell.py
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "gen"))  # blocks.py, pages.py and what they need
