"""Work on frames done on threads beside their reader's or writer's, in order and within bounds."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
# Frames that wait at a time, each some 25 MB at 1920x1080: enough that conversions fill the processor's cores.
DEPTH = 8
WORKERS = min(DEPTH, os.cpu_count() or 1)
_END = object()


def ahead(calls: Iterator[Callable[[], T]], depth: int = DEPTH) -> Iterator[T]:
    """What the calls return, in order, made while those before are used.

    ``calls`` is iterated on one thread and each call made on one of several; at most ``depth`` results wait. What either
    raises is raised here, in its place. Closing this closes ``calls``.
    """
    waiting: queue.Queue[Future | object] = queue.Queue()
    room, stopped = threading.Semaphore(depth), threading.Event()
    workers = ThreadPoolExecutor(WORKERS, "veostyle-read")

    def produce() -> None:
        try:
            for call in calls:
                room.acquire()
                if stopped.is_set():
                    return
                waiting.put(workers.submit(call))
            waiting.put(_END)
        except BaseException as e:
            failed: Future = Future()
            failed.set_exception(e)
            waiting.put(failed)
        finally:
            with suppress(AttributeError):
                calls.close()

    producer = threading.Thread(target=produce, name="veostyle-decode", daemon=True)
    producer.start()
    try:
        while (result := waiting.get()) is not _END:
            value = result.result()
            room.release()
            yield value
            del value
    finally:
        stopped.set()
        room.release()
        workers.shutdown(wait=False, cancel_futures=True)
        producer.join()
