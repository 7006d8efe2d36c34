"""Opening media files with any PyAV."""

from __future__ import annotations

from pathlib import Path

import av
from av.container import InputContainer

# PyAV before 19 raises at tags that are not UTF-8 unless told otherwise; from 19 on it has no such setting.
_LENIENT = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}


def open_input(path: Path) -> InputContainer:
    """A media file opened for reading, whatever is wrong with its tags. Raises av.error.FFmpegError and OSError."""
    return av.open(path, **_LENIENT)
