"""Servers on loopback for tests: real ones in a process of their own, and one that misbehaves on request."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Misbehaving", "Refused", "chat_folder", "misbehaving", "running"]

CHAT = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
DEADLINE = 120.0


def chat_folder(source: Path, to: Path) -> Path:
    """Copy a checkpoint and give its tokenizer a chat template."""
    shutil.copytree(source, to)
    (to / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return to


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[str]:
    """Start `python ARGUMENTS...` with {port} filled in, wait until it answers, and end it afterwards.

    What it wrote is part of the error where it does not come up.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        arguments = [part.format(port=port) for part in command]
        process = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for(process, f"{url}/health", log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{url} did not answer; the server wrote:\n{log.read_text(errors='replace')[-4000:]}")


class Refused(Exception):
    """A request is answered with 400."""


class Misbehaving:
    """A server whose answer to a question is named by the question: `good`, `500`, `malformed`, `stall`, ...

    Attributes:
        url: where it is.
        asked: bodies of all requests, in order.
        owner: who owns its models.
        extra: fields of the last piece of a good answer.
        texts: what it answers to GET, by path.
        whole: makes the choice of an answer that is not streamed, or raises `Refused`; None answers 500.
        prompt_tokens: as how many such an answer says that it read the prompt.
        meeting: where questions for `together` wait for each other.
        most: as many of them were here at once.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.owner = "nobody"
        self.models = ["tiny"]
        self.extra: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self.whole: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self.prompt_tokens: int | None = None
        self.freed = threading.Event()
        self.meeting = threading.Barrier(1)
        self.busy = 0
        self.most = 0
        self.lock = threading.Lock()


@contextmanager
def misbehaving() -> Iterator[Misbehaving]:
    """Run one while the block lasts."""
    state = Misbehaving()
    handler = type("Handler", (_Handler,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            state.freed.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Misbehaving

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        if self.path in self.state.texts:
            self.send(200, self.state.texts[self.path])
        elif self.path == "/v1/models":
            entries = [{"id": name, "object": "model", "owned_by": self.state.owner} for name in self.state.models]
            self.send(200, json.dumps({"object": "list", "data": entries}))
        else:
            self.send(404, "no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        with state.lock:
            state.asked.append(body)
        if state.whole is not None:
            self.answer_whole(body, state.whole)
            return
        if not body.get("stream"):
            self.answer_500(body)
            return
        what = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        getattr(self, "answer_" + what.split()[0].replace("-", "_"))(body)

    def send(self, code: int, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def piece(self, text: str = "", finish: str | None = None, **extra: Any) -> None:
        key = "text" if self.path.endswith("/v1/completions") else "delta"
        value: Any = text if key == "text" else {"content": text}
        self.event(json.dumps({"choices": [{"index": 0, key: value, "finish_reason": finish}], **extra}))

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def answer_whole(self, body: dict[str, Any], make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        read = self.state.prompt_tokens
        usage = {} if read is None else {"prompt_tokens": read}
        try:
            self.send(200, json.dumps({"choices": [make(body)], "usage": usage}))
        except Refused as refusal:
            self.send(400, json.dumps({"error": {"message": str(refusal)}}))

    def answer_good(self, body: dict[str, Any]) -> None:
        self.begin()
        self.piece("one")
        self.piece(" two")
        self.piece(finish="stop", **self.state.extra)
        if "stream_options" in body:
            self.event(json.dumps({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 2}}))
        self.event("[DONE]")

    def answer_together(self, body: dict[str, Any]) -> None:
        # Counted until before the answer begins: whoever has an answer may ask again before this thread goes on.
        state = self.state
        with state.lock:
            state.busy += 1
            state.most = max(state.most, state.busy)
        state.meeting.wait(DEADLINE)
        time.sleep(0.05)
        with state.lock:
            state.busy -= 1
        self.answer_good(body)

    def answer_thinking(self, body: dict[str, Any]) -> None:
        self.begin()
        delta = {"reasoning_content": "hm", "content": None}
        self.event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        self.answer_rest()

    def answer_rest(self) -> None:
        self.piece("so")
        self.piece(finish="length")
        self.event(json.dumps({"choices": [], "usage": {"completion_tokens": 3}}))
        self.event("[DONE]")

    def answer_picky(self, body: dict[str, Any]) -> None:
        if "stream_options" in body:
            self.send(422, json.dumps({"detail": "unexpected field stream_options"}))
        else:
            self.answer_good(body)

    def answer_500(self, body: dict[str, Any]) -> None:
        self.send(500, json.dumps({"error": {"message": "out of memory"}}))

    def answer_malformed(self, body: dict[str, Any]) -> None:
        self.begin()
        self.piece("one")
        self.event('{"choices": [{"del')

    def answer_number(self, body: dict[str, Any]) -> None:
        self.begin()
        self.event("5")
        self.event("[DONE]")

    def answer_page(self, body: dict[str, Any]) -> None:
        self.send(200, "<html>welcome</html>")

    def answer_stall(self, body: dict[str, Any]) -> None:
        self.begin()
        self.piece("one")
        self.state.freed.wait(20)

    def answer_alive(self, body: dict[str, Any]) -> None:
        """Say that it is there, and nothing else; split so that a part of a comment comes alone."""
        self.begin()
        self.piece("one")
        for _ in range(100):
            for part in (b": keep-", b"alive data: x\n\n"):
                self.wfile.write(part)
                self.wfile.flush()
                if self.state.freed.wait(0.03):
                    return

    def answer_lists(self, body: dict[str, Any]) -> None:
        self.begin()
        self.event("[1]")
        self.event("[DONE]")

    def answer_text(self, body: dict[str, Any]) -> None:
        self.begin()
        self.event(json.dumps({"choices": ["a"]}))
        self.event("[DONE]")

    def answer_counts(self, body: dict[str, Any]) -> None:
        """`counts VALUE` says that it emitted VALUE tokens."""
        self.begin()
        self.piece("one", finish="stop")
        value = json.loads(body["messages"][-1]["content"].split()[1])
        self.event(json.dumps({"choices": [], "usage": {"completion_tokens": value}}))
        self.event("[DONE]")

    def answer_die(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = b'data: {"choices": [{"index": 0, "delta": {"content": "one"}}]}\n\n'
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")  # and no last chunk
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def answer_cut(self, body: dict[str, Any]) -> None:
        self.begin()
        self.piece("one two")

    def answer_no_choices(self, body: dict[str, Any]) -> None:
        self.begin()
        self.event(json.dumps({"choices": []}))
        self.event("[DONE]")

    def answer_reported(self, body: dict[str, Any]) -> None:
        self.begin()
        self.piece("one")
        self.event(json.dumps({"error": {"message": "the engine is dead"}}))
