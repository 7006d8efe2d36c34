"""What a run keeps on disk: latents and motion of every frame, how far it has come, and what that rests on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from .errors import OutputError
from .transfer import fetch

FORMAT = 3
# Pieces that wait to be written.
PENDING = 4


class RunStore:
    """A folder of memory-mapped arrays beside a manifest.

    A folder whose manifest differs from the one given belongs to other inputs or options and is begun anew. Arrays are
    mapped only while a slice is read or written, so that what rests here does not count as the process's memory.

    Args:
        folder: made when missing.
        manifest: JSON-able description of everything that the result depends on.
        arrays: name to shape of float32 arrays ``[frames, ...]``.

    Raises:
        OutputError: the folder cannot be written, or another run is using it.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], arrays: dict[str, tuple[int, ...]]):
        self.folder, self.shapes = folder, arrays
        self.manifest = {"format": FORMAT, "arrays": {k: list(v) for k, v in arrays.items()}} | manifest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(str(folder) + ".lock")
            self._lock.acquire(timeout=0)
        except Timeout as e:
            raise OutputError(f"{folder} is in use by another run; wait for it, or choose another output folder") from e
        except OSError as e:
            raise OutputError(f"{folder} cannot be written ({e.strerror}); choose another output folder") from e
        # What is kept is written in order on a thread, while the next is computed.
        self._writing = ThreadPoolExecutor(1, "veostyle-store")
        self._pending: deque[Future] = deque()
        try:
            self.resumed = self._matches()
            os.utime(folder)
            if not self.resumed:
                self._begin()
        except OSError as e:
            self.close()
            raise self._failure(e) from e

    def _matches(self) -> bool:
        try:
            same = json.loads((self.folder / "manifest.json").read_text()) == json.loads(json.dumps(self.manifest))
        except (FileNotFoundError, ValueError):
            return False
        return same and all((self.folder / f"{name}.f32").is_file() for name in self.shapes)

    def _begin(self) -> None:
        if left := _clear(self.folder):
            raise OSError(errno.ENOTEMPTY, f"{left} in it is of no run")
        self.folder.mkdir(exist_ok=True)
        for name, shape in self.shapes.items():
            with (self.folder / f"{name}.f32").open("wb") as file:
                _reserve(file, 4 * int(np.prod(shape, dtype=np.int64)))
        _replace_text(self.folder / "manifest.json", json.dumps(self.manifest, indent=1))

    def _failure(self, error: Exception) -> OutputError:
        reason = getattr(error, "strerror", None) or str(error)
        size = sum(4 * int(np.prod(shape, dtype=np.int64)) for shape in self.shapes.values())
        return OutputError(
            f"{self.folder} cannot be written ({reason}); the run keeps {size / 1e6:,.0f} MB there: "
            "free space, choose another folder, or make the frames smaller"
        )

    def _slice(self, name: str, first: int, count: int, mode: str) -> np.memmap:
        shape = self.shapes[name]
        if not 0 <= first <= first + count <= shape[0]:
            raise IndexError(f"frames {first} to {first + count} of {name}, which holds {shape[0]}")
        frame = 4 * int(np.prod(shape[1:], dtype=np.int64))
        return np.memmap(self.folder / f"{name}.f32", np.float32, mode, first * frame, (count, *shape[1:]))

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Stores frames ``[n, ...]`` from index ``first`` on. They must not change until the next :meth:`read`."""
        if not len(values):
            return
        place = self._slice(name, first, len(values), "r+")
        arrived, array = fetch(values.float())

        def keep() -> None:
            arrived()
            # What is mapped outlives the process without being flushed.
            place[:] = array

        self._later(keep)

    def _later(self, work: Callable[[], None]) -> None:
        """Does something after all that was asked for before; raises what that raised."""
        self._await(PENDING)
        self._pending.append(self._writing.submit(work))

    def flush(self) -> None:
        """Waits until all is written; raises OutputError where something could not be."""
        self._await(0)

    def _await(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Frames ``[count, ...]`` from index ``first``, float32, on the CPU."""
        self.flush()
        return torch.from_numpy(np.array(self._slice(name, first, count, "r")))

    def mapped(self, name: str) -> Tensor:
        """The whole array as a tensor over the file: read where it is touched, changes are not written back."""
        self.flush()
        return torch.from_numpy(self._slice(name, 0, self.shapes[name][0], "c"))

    def save_state(self, name: str, tensors: dict[str, Tensor], **facts: int | str) -> None:
        """Replaces a small named state in one step; what was written before is on disk by then."""
        fetched = {k: fetch(v.float().contiguous()) for k, v in tensors.items()}
        part = self.folder / f"{name}.part"

        def keep() -> None:
            for arrived, _ in fetched.values():
                arrived()
            try:
                save_file({k: array for k, (_, array) in fetched.items()}, part, {k: str(v) for k, v in facts.items()})
                os.replace(part, self.folder / f"{name}.safetensors")
            except (OSError, SafetensorError) as e:
                part.unlink(missing_ok=True)
                raise self._failure(e) from e

        self._later(keep)

    def drop_state(self, name: str) -> None:
        """Forgets a named state."""
        self.flush()
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def load_state(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The named state and its facts, or None before the first."""
        self.flush()
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                return {k: file.get_tensor(k) for k in file.keys()}, file.metadata() or {}
        except SafetensorError as e:
            raise OutputError(f"{path} is damaged ({e}); delete {self.folder} to begin anew") from e

    def close(self) -> None:
        """Lets another run use the folder. What is stored stays, and can be read and added to."""
        wait(self._pending)
        self._lock.release()

    def remove(self) -> None:
        """Deletes everything that the run kept."""
        wait(self._pending)
        with contextlib.suppress(OSError):
            _clear(self.folder)
        _unlock(self._lock)


# All that a run keeps: what another name has is not its own.
_OWN = re.compile(r"manifest\.(json|part)|\w+\.f32|[\w-]+\.(safetensors|part)|segment-[\w-]+\.\w+|\.[0-9a-f]{32}.*")


def _clear(folder: Path) -> str | None:
    """Removes what a run made of a folder, and the folder where nothing else is in it; else names what is."""
    other = None
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink() and _OWN.fullmatch(path.name):
            path.unlink()
        else:
            other = path.name
    if other is None:
        folder.rmdir()
    return other


def _unlock(lock: FileLock) -> None:
    """Gives a lock back and removes its file, before another run could take it."""
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def _reserve(file: BinaryIO, size: int) -> None:
    """Takes the whole space now: writing to a mapped file on a full disk would end the process without a word."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    elif shutil.disk_usage(Path(file.name).parent).free < size:
        raise OSError(errno.ENOSPC, "no space left on the disk")
    else:
        file.truncate(size)


def _replace_text(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the most recently used runs in a folder of runs; one in use, and what no run made, is left alone."""
    if not folder.is_dir():
        return
    runs = [r for r in folder.iterdir() if _is_run(r)]
    for run in sorted(runs, key=lambda r: r.stat().st_mtime, reverse=True)[keep:]:
        lock = FileLock(str(run) + ".lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        with contextlib.suppress(OSError):
            _clear(run)
        _unlock(lock)


def _is_run(folder: Path) -> bool:
    """Whether a run made a folder, by its manifest."""
    try:
        return not folder.is_symlink() and {"format", "arrays"} <= set(
            json.loads((folder / "manifest.json").read_text())
        )
    except (OSError, ValueError, TypeError):
        return False
