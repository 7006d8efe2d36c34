"""Launch settings found by trying them once on this chip, kept on disk."""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ._triton import TritonError, triton

log = logging.getLogger(__name__)
Settings = dict[str, int]
# Of the kernels; a change of one that moves its best settings raises this.
VERSION = 1
REPEATS, ENOUGH_MS = 10, 200.0


def cache_file() -> Path:
    """``veostyle/kernels.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "veostyle" / "kernels.json"


def best(kernel: str, bucket: str, candidates: Sequence[Settings], run: Callable[[Settings], Any]) -> Settings:
    """The fastest of some settings for a kind of input on this chip: known from before, or tried now.

    While a CUDA graph is captured nothing can be timed; then it is the first that there is.

    Args:
        bucket: names the kind of input coarsely, so that little is tried.
        run: launches the kernel; a candidate that raises is left out.

    Raises:
        RuntimeError: none of the candidates runs.
    """
    key = f"{torch.cuda.get_device_name()} | Triton {triton.__version__} | {VERSION} | {kernel} | {bucket}"
    known = _known().get(key)
    if known in candidates:
        return known
    if torch.cuda.is_current_stream_capturing():
        return candidates[0]
    log.info("%s: trying %d settings for %s on this chip, once", kernel, len(candidates), bucket)
    times = {i: t for i, c in enumerate(candidates) if (t := _time(run, c)) is not None}
    if not times:
        raise RuntimeError(f"{kernel}: none of {len(candidates)} settings runs for {bucket} on this chip")
    _known()[key] = candidates[min(times, key=times.__getitem__)]
    _save()
    return _known()[key]


def _time(run: Callable[[Settings], Any], settings: Settings) -> float | None:
    """Milliseconds of a launch, the least of a few; None where it does not run here."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    try:
        run(settings)
        while len(times) < REPEATS and sum(times) < ENOUGH_MS:
            begin.record()
            run(settings)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    except (TritonError, RuntimeError) as e:
        # Too much shared memory or too many registers for this chip.
        log.debug("%s does not run: %s", settings, e)
        return None
    return min(times)


@functools.cache
def _known() -> dict[str, Settings]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _save() -> None:
    """Writes what is known; where the folder cannot be written, it is tried again in the next process."""
    path = cache_file()
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(_known(), indent=1))
        part.replace(path)
    except OSError as e:
        log.debug("%s is not kept: %s", path, e)
        with contextlib.suppress(OSError):
            part.unlink()
