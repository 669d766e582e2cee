"""What DVC's output means for whoever pushes or pulls. What it printed is from DVC 3.67.1 with dvc-s3 3.3.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.errors import PreflightError, ServiceError
from dspark.workspace.remote import _failure

AWAY = """\
ERROR: failed to connect to s3 (models/dvc/files/md5) - Could not connect to the endpoint URL: "http://127.0.0.1:9/x"
ERROR: failed to pull data from the cloud - 1 files failed to download
"""
NO_KEY = """\
ERROR: failed to transfer '2fc57d6f' - The specified key does not exist.: An error occurred (NoSuchKey) when calling x
ERROR: unexpected error - [Errno 2] No such file or directory: '/w/.dvc/cache/files/md5/2f/.WYtap1piUUC.tmp'
"""
MISSING = """\
WARNING: Some of the cache files do not exist neither locally nor on remote. Missing cache files:
md5: 82b5c5dd6f96feca1b1e147acdb70915.dir
ERROR: failed to pull data from the cloud - Checkout failed for following targets:
out
"""
UNSAVED = """\
ERROR: failed to pull data from the cloud - Can't remove the following unsaved files without confirmation. Use `--force`
/w/builds/b/train/mine
"""
NO_S3 = "ERROR: unexpected error - s3 is supported, but requires 'dvc-s3' to be installed\n"


@pytest.mark.parametrize(
    ("code", "output", "error", "said", "hint"),
    [
        (1, AWAY, ServiceError, "failed to connect to s3", "the same command goes on"),
        (255, NO_KEY, PreflightError, "does not hold everything", "dspark remote push --build b"),
        (1, MISSING, PreflightError, "does not hold everything", "dspark remote push --build b"),
        (1, UNSAVED, PreflightError, "were changed here", "dspark run --build b"),
        (255, NO_S3, PreflightError, "DVC needs dvc-s3", "pip install 'dspark[remote]'"),
        (0, "WARNING: No remote provided and no default remote set.\n", PreflightError, "no default", "dvc remote add"),
        (255, "", ServiceError, "it said nothing", "log"),
    ],
)
def test_each_failure_says_what_to_do(code: int, output: str, error: type, said: str, hint: str) -> None:
    found = _failure(code, output.splitlines(), "b", "pull", Path("remote.log"))
    assert type(found) is error and said in found.message and hint in found.hint


def test_success_is_none() -> None:
    assert _failure(0, ["3 files fetched and 2 files added"], "b", "pull", Path("remote.log")) is None
