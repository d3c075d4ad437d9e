"""Processes that compile: run as `python -m coda_lang.backend_cute.worker`, they take pickled jobs on standard input and answer each.

In: `compile.Job`s (anything with `run(path)`) and the path each object goes to. Out: the objects; an error in a worker is raised in the
caller. `Pool` keeps a number of workers, started when first needed. A worker that dies takes its job with it, not the pool. `shared` is
the process's pool: its workers stay for a while, since the kernels of a backward are asked for soon after those of the forward.
Non-goals: caching, ordering.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..diagnostics.model import CodaError, InternalError
from . import errors

IDLE = 20.0  # seconds


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.noise: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.noise = [*self.noise[-50:], line]

    def fits(self) -> bool:
        """Does it live, in the environment of now?"""
        return self.process.poll() is None and self.environment == dict(os.environ)

    def ask(self, question: Any) -> Any:
        """Send a question, wait for the answer. Raises EOFError or OSError where the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(question, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def stop(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


class Pool:
    """At most `count` workers; a context manager. `run` may be called from several threads."""

    def __init__(self, count: int) -> None:
        self.places: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self.count = 0
        self.grow(count)

    def grow(self, count: int) -> None:
        """Room for at least `count` workers."""
        for _ in range(self.count, count):
            self.places.put(None)
        self.count = max(self.count, count)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Wait for all workers and end them; others start when they are needed."""
        stopped = [self.places.get() for _ in range(self.count)]
        self.count = 0
        for worker in stopped:
            if worker is not None:
                worker.stop()

    def run(self, job: Any, path: Path) -> None:
        """Compile a job to `path`. Raises what the worker raised: CallError, ValueError (the configuration does not fit), InternalError."""
        worker = self.places.get()
        try:
            if worker is not None and not worker.fits():
                worker.stop()
                worker = None
            worker = worker or _Worker()
            try:
                kind, *answer = worker.ask((job, path))
            except (EOFError, OSError, pickle.UnpicklingError):
                dead, worker = worker, None
                dead.stop()
                said = b"".join(dead.noise).decode(errors="replace")
                ended = f"the process that compiled {job.kernel.name} ended with status {dead.process.returncode}"
                raise InternalError(f"{ended}\n{said}") from None
        finally:
            self.places.put(worker)
        if kind == "refused":
            raise errors.CallError(answer[0])
        if kind == "value":
            raise ValueError(answer[0])
        if kind == "missing":
            what = f"compiling kernels needs the CuTe DSL: {answer[0]}"
            raise errors.refuse(errors.TOOLS, what, help="pip install nvidia-cutlass-dsl==4.8.1")
        if kind == "failed":
            raise InternalError(f"{job.kernel.name} does not compile:\n{answer[0]}")


class _Shared:
    """The process's pool, how many use it, and the clock that ends idle workers. Workers end by themselves when this process does."""

    def __init__(self) -> None:
        self.lock, self.pool, self.users, self.clock = threading.Lock(), Pool(0), 0, threading.Timer(0, lambda: None)

    def idle(self) -> None:
        with self.lock:
            if self.users == 0:
                self.pool.stop()


_SHARED = _Shared()
if hasattr(os, "register_at_fork"):  # a child must not talk to its parent's workers
    os.register_at_fork(after_in_child=lambda: _SHARED.__init__())  # type: ignore[misc]


@contextlib.contextmanager
def shared(count: int) -> Iterator[Pool]:
    """The process's pool, with room for at least `count` workers; they end when nobody has needed them for IDLE seconds."""
    with _SHARED.lock:
        _SHARED.clock.cancel()
        _SHARED.users += 1
        _SHARED.pool.grow(count)
    try:
        yield _SHARED.pool
    finally:
        with _SHARED.lock:
            _SHARED.users -= 1
            if _SHARED.users == 0:
                _SHARED.clock = threading.Timer(IDLE, _SHARED.idle)
                _SHARED.clock.daemon = True
                _SHARED.clock.start()


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    while True:
        try:
            job, path = pickle.load(questions)
        except EOFError:
            return
        try:
            job.run(path)
            answer: tuple[Any, ...] = ("done",)
        except CodaError as problem:
            answer = ("refused", problem.diagnostics)
        except ValueError as problem:
            answer = ("value", str(problem)) if _ours(problem) else ("failed", traceback.format_exc())
        except ImportError as problem:
            answer = ("missing", str(problem))
        except Exception as problem:
            output = getattr(problem, "stderr", None) or ""
            answer = ("failed", traceback.format_exc() + output)
        pickle.dump(answer, answers)
        answers.flush()


def _ours(problem: BaseException) -> bool:
    """Was it raised by this package's own code, on purpose?"""
    frame = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent)


def main() -> None:
    """Serve standard input; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
