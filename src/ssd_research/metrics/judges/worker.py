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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError


class WorkerJudge:
    """Asks the worker that `command` starts (a list of words); `timeout` is seconds per picture.

    The first picture has no deadline, as the worker loads its model then. It ends with the judge.
    """

    def __init__(self, command: Sequence[str], *, timeout: float = 600.0) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"eval.judge.command={command} must be a list of words")
        self.command = [str(word) for word in command]
        self.timeout = timeout
        self._words = shlex.join(self.command)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._deadline: float | None = None
        self._start()
        hello = self._receive()
        try:
            self.name, self.version = str(hello["name"]), str(hello["version"])
        except KeyError as error:
            raise JudgeError(f"the judge `{self._words}` began without its {error}") from error

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return the worker's answers; JudgeError if it dies, is late or strays."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        picture = base64.b64encode(buffer.getvalue()).decode()
        self._send({"image": picture, "questions": [asked.question for asked in questions]})
        reply = self._receive()
        self._deadline = self.timeout
        if "error" in reply:
            raise JudgeError(f"the judge `{self._words}` gave up: {reply['error']}")
        answers = reply.get("answers")
        if not isinstance(answers, list) or len(answers) != len(questions):
            raise JudgeError(
                f"the judge `{self._words}` did not give {len(questions)} answers: {reply}"
            )
        return [_answer(entry) for entry in answers]

    def close(self) -> None:
        """End the worker."""
        self._end()

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
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
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._deadline)
        except queue.Empty:
            self._end()
            raise JudgeError(
                f"the judge `{self._words}` was silent for {self.timeout:g} s; "
                "raise eval.judge.timeout"
            ) from None
        if not line.endswith("\n"):
            raise self._death()
        try:
            return dict(json.loads(line))
        except (TypeError, ValueError) as error:
            self._end()
            raise JudgeError(
                f"the judge `{self._words}` wrote what is no JSON object: {line.strip()[:80]!r}"
            ) from error

    def _death(self) -> JudgeError:
        """Return the error that says how the worker ended, with its last words on stderr."""
        status = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = f": {words[-1].strip()}" if words else ""
        return JudgeError(f"the judge `{self._words}` ended with status {status}{last}")


def _answer(entry: Any) -> Answer:
    if isinstance(entry, dict):
        return Answer(str(entry.get("answer", "")), entry.get("p_yes"))
    return Answer(str(entry))


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
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
