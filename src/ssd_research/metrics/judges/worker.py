"""A VQA judge in a process of its own, and so in a Python environment of its own.

Both sides speak JSON, one line a message, over the worker's standard input and output:

    worker: {"name": ..., "version": ...}                          at once, before it loads a model
    we:     {"image": <PNG in base64>, "questions": [text, ...]}
    worker: {"answers": ["yes", ...]}                              or {"error": text}

An answer may also be {"answer": text, "p_yes": number}. `scripts/mplug_worker.py` is such a worker.
"""

import base64
import io
import json
import queue
import shlex
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError

GRACE = 2  # seconds for a worker to end once it has closed its output or we its input


class WorkerJudge:
    """Asks the worker that `command` starts (a list of words); it ends with the judge.

    `timeout` is seconds per picture. `load_timeout` bounds instead its start, and then the first
    picture, with which the worker loads its model.
    """

    def __init__(
        self, command: Sequence[str], *, timeout: float = 600.0, load_timeout: float = 3600.0
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"eval.judge.command={command} must be a list of words")
        self.command = [str(word) for word in command]
        self._limits = {
            "load_timeout": _seconds("load_timeout", load_timeout),
            "timeout": _seconds("timeout", timeout),
        }
        self._limit = "load_timeout"
        self._words = shlex.join(self.command)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._start()
        with self._ended_on_error():
            hello = self._receive()
            for word in ("name", "version"):
                if not isinstance(hello.get(word), str):
                    raise self._stray(f"began without its {word!r}")
        self.name, self.version = hello["name"], hello["version"]

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return the worker's answers; JudgeError if it dies, is late or strays."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        picture = base64.b64encode(buffer.getvalue()).decode()
        with self._ended_on_error():
            self._refuse_unasked()
            self._send({"image": picture, "questions": [asked.question for asked in questions]})
            answers = self._receive().get("answers")
            if not isinstance(answers, list) or len(answers) != len(questions):
                raise self._stray(f"did not give {len(questions)} answers: {answers!s:.80}")
            found = [self._answer(entry) for entry in answers]
        self._limit = "timeout"
        return found

    def close(self) -> None:
        """End the worker."""
        self._end()

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Killed first: to close the pipe of a worker that does not read would wait for it.
            self._process.kill()
            self._end()
            raise

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise JudgeError(
                f"eval.judge.command: `{self._words}` cannot be started: {error.strerror}"
            ) from error
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        # A thread reads, so that waiting can end: a pipe has no deadline of its own.
        threading.Thread(target=_forward, args=(process.stdout, self._lines), daemon=True).start()
        self._end = weakref.finalize(self, _stop, process)

    def _send(self, message: dict[str, Any]) -> None:
        """Hand on a message in a thread: a worker that does not read would hold us up for ever."""
        line = json.dumps(message) + "\n"
        threading.Thread(target=_write, args=(self._process.stdin, line), daemon=True).start()

    def _receive(self) -> dict[str, Any]:
        """Return the worker's next message."""
        seconds = self._limits[self._limit]
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            hint = f"raise eval.judge.{self._limit}"
            raise self._stray(f"was silent for {seconds:g} s; {hint}") from None
        if not line.endswith("\n"):
            raise self._death()
        try:
            message = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise self._stray(f"wrote what is no JSON object: {line.strip()[:80]!r}") from error
        if "error" in message:
            raise self._stray(f"gave up: {message['error']}")
        return message

    def _refuse_unasked(self) -> None:
        """Raise JudgeError if the worker ended or spoke since its last answer: they would shift."""
        if not self._lines.empty():
            line = self._lines.get()
            if not line.endswith("\n"):
                raise self._death()
            raise self._stray(f"wrote what it was not asked for: {line.strip()[:80]!r}")

    def _answer(self, entry: Any) -> Answer:
        """Return one answer: a text, or a text and a probability."""
        said = entry if isinstance(entry, dict) else {"answer": entry}
        text, p_yes = said.get("answer"), said.get("p_yes")
        known = isinstance(p_yes, int | float) and 0 <= p_yes <= 1
        if not isinstance(text, str) or not (known or p_yes is None):
            raise self._stray(f"gave what is no answer: {entry!s:.80}")
        return Answer(text, p_yes)

    def _stray(self, what: str) -> JudgeError:
        return JudgeError(f"the judge `{self._words}` {what}")

    def _death(self) -> JudgeError:
        """Return the error that says how the worker ended, with its last words on stderr."""
        try:
            how = f"ended with status {self._process.wait(timeout=GRACE)}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return self._stray(how + (f": {words[-1].strip()}" if words else ""))


def _seconds(name: str, value: float) -> float:
    """Return a time limit; ValueError unless it is a number of seconds above 0."""
    if isinstance(value, int | float) and 0 < value <= threading.TIMEOUT_MAX:
        return value
    raise ValueError(f"eval.judge.{name}={value} must be a number of seconds above 0")


def _write(stream: Any, line: str) -> None:
    """Write to a worker; one that is gone is noticed where its answer is awaited."""
    with suppress(OSError, ValueError):
        stream.write(line)
        stream.flush()


def _forward(stream: Any, lines: "queue.Queue[str]") -> None:
    """Hand on every line of a stream, then an empty one for its end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _stop(process: "subprocess.Popen[str]") -> None:
    """Close a worker's input and, if it does not go by itself, kill it."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
