"""A local model hub that serves a directory to huggingface_hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
ID = "someone/some-model"
BYTES = 1000
"""Bytes that huggingface_hub writes at a time under the fixture `hub`."""


class Hub(ThreadingHTTPServer):
    """One repository.

    fetched: (file, first byte) of each download, in order. cut: file -> bytes after which each download breaks off.
    sent: file -> bytes after which nothing is sent. damaged: file that is served with other bytes. gated: refuse
    downloads. architecture: of its GGUF files. files_at: another hub that the large files are redirected to. tokens:
    values of the header Authorization.
    """

    daemon_threads = True

    def __init__(self, repository: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.fetched = repository, list[tuple[str, int]]()
        self.cut, self.sent = dict[str, int](), dict[str, int]()
        self.gated = False
        self.damaged: str | None = None
        self.architecture: str | None = None
        self.files_at: Hub | None = None
        self.tokens = set[str | None]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def names(self) -> set[str]:
        return {name for name, _ in self.fetched}


@contextmanager
def serving(repository: Path) -> Iterator[Hub]:
    hub = Hub(repository)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.gated and "/resolve/" in path:
            return self._refuse(403, "GatedRepo")
        if ID not in path:
            return self._refuse(404, "RepoNotFound")
        if path.startswith(f"/api/models/{ID}/tree/"):
            return self._json([self._entry(file) for file in self._files()])
        if path.startswith(f"/api/models/{ID}"):
            revision = path.removeprefix(f"/api/models/{ID}").removeprefix("/revision/")
            if revision not in ("", "main", "v1", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            info = {"id": ID, "sha": COMMIT, "siblings": [{"rfilename": f} for f in self._files()]}
            return self._json(info | {"gguf": {"architecture": self.server.architecture}})
        return self._file(path.split("/resolve/")[1].partition("/")[2])

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _files(self) -> list[str]:
        root = self.server.repository
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    def _entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "oid": self._digest(name), "size": self._path(name).stat().st_size}

    def _path(self, name: str) -> Path:
        return self.server.repository / name

    def _digest(self, name: str) -> str:
        large = name.endswith((".gguf", ".safetensors"))
        return hashlib.new("sha256" if large else "sha1", self._path(name).read_bytes()).hexdigest()

    def _file(self, name: str) -> None:
        if not self._path(name).is_file():
            return self._refuse(404, "EntryNotFound")
        if self.server.files_at is not None:
            return self._redirect(name, self.server.files_at)
        content = self._path(name).read_bytes()
        if name == self.server.damaged:
            content = bytes(8) + content[8:]
        wanted = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        start = int(wanted or 0)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{self._digest(name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        cut, sent = self.server.cut.get(name), self.server.sent.get(name)
        if self.command == "GET" and (cut, sent) != (None, None):
            self.send_header("Connection", "close")  # the client must not use it again, and http.server closes it
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.server.fetched.append((name, start))
        self.wfile.write(content[:sent][start : None if cut is None else start + cut])
        return None

    def _redirect(self, name: str, other: Hub) -> None:
        self.send_response(302)
        self.send_header("Location", f"{other.url}{self.path}")
        self.send_header("X-Linked-ETag", f'"{self._digest(name)}"')
        self.send_header("X-Linked-Size", str(self._path(name).stat().st_size))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
