"""Where the runs of a sweep are trained: in processes of this machine, or on Ray."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from flatmtl_bench.sweep.work import stop_at

T = TypeVar("T")
R = TypeVar("R")


class ProcessDied(Exception):
    """The process that worked at an item has ended without a result, for example because the memory was full."""


class Pool(Protocol):
    """Processes that each work at one item at a time."""

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | ProcessDied]]:
        """Yield each item with its result as soon as that is there, or with what became of its process.

        An exception of ``work`` ends it all and is raised here.
        """
        ...

    def stop(self) -> None:
        """Begin no further item, and tell the processes to stop, as their signal does."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class LocalPool:
    """Processes of this machine, kept by joblib, which end when this one does.

    Args:
        jobs: number of processes at work at a time.
        threads: of PyTorch in each.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs, self.threads = jobs, threads
        self._stopping = False

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | ProcessDied]]:
        """See `Pool`."""
        left = dict(enumerate(items))
        while left and not self._stopping:
            try:
                for index, result in self._parallel(work, left.items(), self.jobs):
                    yield left.pop(index), result
            except BrokenProcessPool:  # which ends all processes: find the item to blame
                for index in takewhile(lambda _: not self._stopping, list(left)[: self.jobs]):
                    result = self._alone(work, index, left[index])
                    yield left.pop(index), result

    def _alone(self, work: Callable[[T], R], index: int, item: T) -> R | ProcessDied:
        try:
            ((_, result),) = self._parallel(work, [(index, item)], 1)
        except BrokenProcessPool as error:
            return ProcessDied(str(error))
        return result

    def _parallel(
        self, work: Callable[[T], R], items: Iterable[tuple[int, T]], at_a_time: int
    ) -> Iterator[tuple[int, R]]:
        """Give the items to the processes, so many at a time, and none after :meth:`stop`."""
        options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1, "pre_dispatch": at_a_time}
        parallel = Parallel(max(2, at_a_time), "loky", **options)  # joblib makes no process for one
        wanted = takewhile(lambda _: not self._stopping, list(items))
        results: Any = parallel(delayed(_call)(work, *item, self.threads, os.getpid()) for item in wanted)
        return results

    def stop(self) -> None:
        """See `Pool`."""
        self._stopping = True
        for process in multiprocessing.active_children():
            process.terminate()

    def close(self) -> None:
        """See `Pool`."""
        executor = get_reusable_executor(reuse=True)  # pyright: ignore[reportArgumentType]  (not only text)
        executor.shutdown(wait=True, kill_workers=True)


def _call(work: Callable[[T], R], index: int, item: T, threads: int, parent: int) -> tuple[int, R]:
    _become_worker(parent)
    return index, _with_threads(threads, work, item)


@cache
def _become_worker(parent: int) -> None:
    """Make this process stop when the parent says so, which gets Ctrl-C too, and end when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_at(signal.SIGTERM)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class RayPool:
    """Ray: on a cluster that is there, or on one that is made of this machine for as long as the sweep takes.

    Args:
        address: of a cluster; ``None``: this machine.
        jobs: number of runs at a time on this machine; a cluster decides that by itself.
        threads: of PyTorch for each run, for which as many CPUs are reserved.
    """

    def __init__(self, address: str | None, jobs: int, threads: int) -> None:
        try:
            import ray  # noqa: PLC0415  (the extra `sweep`)
        except ModuleNotFoundError:
            raise ValueError('--ray needs Ray, which is not installed: pip install "flatmtl[sweep]".') from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of a sweep unless the user wants it
        own = {} if address else {"num_cpus": jobs * threads, "include_dashboard": False}
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        self._ray, self.threads = ray, threads
        devices = ray.cluster_resources().get("GPU", 0)
        self._gpus = 0 if not devices else 1 if address else min(1, devices / jobs)
        self._left: dict[Any, Any] = {}

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | ProcessDied]]:
        """See `Pool`."""
        call = self._ray.remote(num_cpus=self.threads, num_gpus=self._gpus, max_retries=0)(_call_on_ray)
        self._left = {call.remote(work, item, self.threads, os.getcwd()): item for item in items}
        while self._left:
            done, _ = self._ray.wait(list(self._left), timeout=1.0)
            for reference in done:
                item, result = self._left.pop(reference), self._result(reference)
                if result is not None:
                    yield item, result

    def _result(self, reference: Any) -> Any:
        """Return what a task came to, ``None`` if it was cancelled before it began."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.TaskCancelledError:
            return None
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            return ProcessDied(str(error))

    def stop(self) -> None:
        """See `Pool`."""
        for reference in self._left:
            self._ray.cancel(reference)

    def close(self) -> None:
        """See `Pool`."""
        self._ray.shutdown()


def _call_on_ray(work: Callable[[T], R], item: T, threads: int, folder: str) -> R:
    os.chdir(folder)  # relative paths mean what they mean where the sweep was started
    stop_at(signal.SIGINT)  # which is how Ray cancels
    return _with_threads(threads, work, item)


def _with_threads(threads: int, work: Callable[[T], R], item: T) -> R:
    import torch  # noqa: PLC0415  (seconds, which the parent does not need)

    torch.set_num_threads(threads)
    return work(item)
