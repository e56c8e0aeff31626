"""Possible disk contents after a power loss, rebuilt from the writes and syncs of a process.

This is the weakest model that POSIX allows and disks show. A write without a later sync may be present, absent, or
partly present (whole sectors of 512 bytes), in any combination with other writes, but never covered by an older write.
Syncing a file makes its writes and its length durable. Names (created, renamed, removed files) are durable once their
directory is synced; before that, the first few changes of a directory may be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from disk_shim import Call, Event

SECTOR = 512
POLICIES = ("none", "all", "half", "few", "most", "torn", "newest", "oldest")


@dataclass
class _Write:
    offset: int
    data: bytes
    durable: bool = False
    cut: bool = False  # of a truncation: `offset` is the length


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)  # durable
    pending: list[_Write] = field(default_factory=list)

    def sync(self) -> None:
        for write in self.pending:
            _apply(self.content, write)
        self.pending = []


@dataclass
class _Change:
    """A change of a name. inode None: the name is removed."""

    path: str
    inode: int | None
    is_folder: bool = False
    durable: bool = False
    old_path: str = ""


class Disk:
    """Tracks events; `image` returns possible disk contents. root exists and is durable from the start."""

    def __init__(self, root: Path) -> None:
        self._root, self._root_inode = str(root), root.stat().st_ino
        self._files: dict[int, _File] = {}
        self._folders = {self._root_inode: self._root}
        self._changes: list[_Change] = []

    def follow(self, event: Event) -> None:
        call, path = event.call, event.path
        if call == Call.WRITE:
            self._file(event.inode).pending.append(_Write(event.offset, event.data))
        elif call == Call.DURABLE:
            self._file(event.inode).pending[-1].durable = True
        elif call == Call.TRUNCATE:
            self._file(event.inode).pending.append(_Write(event.offset, b"", cut=True))
        elif call == Call.SYNC and event.inode in self._folders:
            folder = self._folders[event.inode]
            for change in self._changes:
                change.durable |= _parent(change.path) == folder
        elif call == Call.SYNC:
            self._file(event.inode).sync()
        elif call == Call.CREATE:
            self._files[event.inode] = _File()  # the number may be that of a file that is gone
            self._changes.append(_Change(path, event.inode))
        elif call == Call.MKDIR:
            self._folders[event.inode] = path
            self._changes.append(_Change(path, event.inode, is_folder=True))
        elif call == Call.RENAME:
            self._changes.append(_Change(path, event.inode, old_path=event.data.decode()))
        elif call == Call.UNLINK:
            self._folders.pop(event.inode, None)
            self._changes.append(_Change(path, None))

    def image(self, rng: random.Random, policy: str) -> tuple[set[str], dict[str, bytes]]:
        """(folders, file contents), by path relative to the root."""
        names: dict[str, tuple[int, bool]] = {}
        stops = {_parent(c.path): rng.random() for c in self._changes}
        order = dict.fromkeys(stops, 0)
        counts = {folder: sum(not c.durable for c in self._changes if _parent(c.path) == folder) for folder in stops}
        for change in self._changes:
            folder = _parent(change.path)
            if not change.durable:
                share = {"none": 0.0, "all": 1.0}.get(policy, stops[folder])
                order[folder] += 1
                if order[folder] > share * counts[folder] + 0.5:
                    continue
            names.pop(change.old_path, None)
            if change.inode is None:
                names.pop(change.path, None)
            else:
                names[change.path] = (change.inode, change.is_folder)
        folders = {self._root}
        files: dict[str, bytes] = {}
        for path, (_, is_folder) in sorted(names.items()):
            if is_folder and _parent(path) in folders:
                folders.add(path)
        for path, (inode, is_folder) in names.items():
            if not is_folder and _parent(path) in folders:
                files[self._relative(path)] = self._content(self._file(inode), rng, policy)
        return {self._relative(f) for f in folders if f != self._root}, files

    def _content(self, file: _File, rng: random.Random, policy: str) -> bytes:
        content, last = bytearray(file.content), len(file.pending) - 1
        for number, write in enumerate(file.pending):
            share = {"none": 0.0, "all": 1.0, "half": 0.5, "few": 0.1, "most": 0.9, "torn": 0.5}.get(policy, 0.0)
            if policy in ("newest", "oldest"):
                share = float(number == (last if policy == "newest" else 0))
            if write.durable or (rng.random() < share and (write.cut or policy != "torn")):
                _apply(content, write)
            elif policy == "torn":
                for start in range(0, len(write.data), SECTOR):
                    if rng.random() < share:
                        _apply(content, _Write(write.offset + start, write.data[start : start + SECTOR]))
        return bytes(content)

    def _file(self, inode: int) -> _File:
        return self._files.setdefault(inode, _File())

    def _relative(self, path: str) -> str:
        return path[len(self._root) + 1 :]


def lay_out(folders: set[str], files: dict[str, bytes], target: Path) -> None:
    """Write an image to a folder, to open it."""
    for name in sorted(folders):
        (target / name).mkdir(mode=0o700, parents=True)
    for name, content in files.items():
        (target / name).write_bytes(content)


def cuts(events: Sequence[Event], count: int, rng: random.Random) -> list[int]:
    """Return `count` moments in order, spread over all events. A moment is the number of events so far."""
    return sorted(rng.randrange(1, len(events) + 1) for _ in range(count))


def _apply(content: bytearray, write: _Write) -> None:
    if write.cut:
        if write.offset < len(content):
            del content[write.offset :]
        else:
            content.extend(bytes(write.offset - len(content)))
        return
    end = write.offset + len(write.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[write.offset : end] = write.data


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)
