"""Office Open XML packages (ECMA-376, part 2): a ZIP archive of XML parts with relations between them."""

from __future__ import annotations

import io
import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import unquote
from xml.etree.ElementTree import Element, ParseError

from cacheblend_documents.converted import NotConverted
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import COMPOUND, OLD_OFFICE

_MOST_UNPACKED = 512 << 20  # bytes of an archive
_LOCKED = "EncryptedPackage".encode("utf-16-le")
_LARGEST = 1 << 53
"""Larger numbers are damage; floats have this one exactly."""
_NAMESPACES = {
    "w": ("wordprocessingml/2006/main", "wordprocessingml/main"),
    "a": ("drawingml/2006/main", "drawingml/main"),
    "p": ("presentationml/2006/main", "presentationml/main"),
    "x": ("spreadsheetml/2006/main", "spreadsheetml/main"),
    "m": ("officeDocument/2006/math", "officeDocument/math"),
    "c": ("drawingml/2006/chart", "drawingml/chart"),
    "dgm": ("drawingml/2006/diagram", "drawingml/diagram"),
    "r": ("officeDocument/2006/relationships", "officeDocument/relationships"),
    "mc": ("markup-compatibility/2006", "markup-compatibility/2006"),
}
_PREFIXES = {
    address: prefix
    for prefix, (transitional, strict) in _NAMESPACES.items()
    for address in (f"http://schemas.openxmlformats.org/{transitional}", f"http://purl.oclc.org/ooxml/{strict}")
}
"""Namespace -> prefix: those of Transitional and of Strict Open XML."""
_MAINS = ("word/document.xml", "ppt/presentation.xml", "xl/workbook.xml")
"""Usual names of main parts, for packages whose own relations are missing or damaged."""
_READ_ERRORS = (KeyError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


def opened(data: bytes, what: str) -> zipfile.ZipFile:
    """Open the archive. Raises NotConverted if it is not a ZIP archive, has a password or is too large unpacked."""
    if data.startswith(COMPOUND):
        if _LOCKED in data:
            raise NotConverted(f"{what} with a password", "with a password")
        raise NotConverted(OLD_OFFICE, "damaged or locked")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise NotConverted(f"not {what}", "damaged or locked") from error
    if any(entry.flag_bits & 1 for entry in archive.infolist()):
        raise NotConverted(f"{what} with a password", "with a password")
    if sum(entry.file_size for entry in archive.infolist()) > _MOST_UNPACKED:
        raise NotConverted(f"unpacks to more than {_MOST_UNPACKED >> 20} MiB", "too large unpacked")
    return archive


class DamagedPart(Exception):
    """Raised for a part that cannot be unpacked or parsed."""


@contextmanager
def reporting_damage(omissions: Omissions, sentence: str) -> Iterator[None]:
    """Convert a DamagedPart to an omission: a sentence such as "slide 3 cannot be read"."""
    try:
        yield
    except DamagedPart:
        omissions.say(sentence)


@dataclass(frozen=True)
class Relation:
    """A relation from one part to another."""

    kind: str  # last component of the relation's type: "image", "footnotes"
    target: str  # name of the other part; an address if it is outside of the package
    external: bool = False


class OfficePackage:
    """Parts of a Word, PowerPoint or Excel file, or of an EPUB book."""

    def __init__(self, data: bytes, what: str) -> None:
        """what: the kind of file, for messages. Raises NotConverted if it is not a ZIP archive or is too large."""
        from defusedxml import ElementTree  # without it, say so before anything about the file

        self._parser = ElementTree
        self._archive = opened(data, what)
        self._what = what
        self.drawn = set[str]()
        """Names of the drawings and embedded documents whose text is given already."""
        self._entries = {name.replace("\\", "/").lstrip("/").lower(): name for name in self._archive.namelist()}
        self.names = list(self._entries)
        """Names of the parts, in lower case."""

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._entries

    @cached_property
    def main(self) -> str:
        """Name of the main part. Raises NotConverted if there is none."""
        found = [*self.related("", "officeDocument"), *(name for name in _MAINS if name in self)]
        if not found:
            raise NotConverted(f"not {self._what}", "damaged or locked")
        return found[0]

    def data(self, name: str) -> bytes:
        """Unpack a part. Raises DamagedPart if it is missing or damaged."""
        try:
            return self._archive.read(self._entries[name.lower()])
        except _READ_ERRORS as error:
            raise DamagedPart(name) from error

    def content_type(self, name: str) -> str:
        """Return the declared media type of a part in lower case, "" if there is none."""
        types, extension = self._content_types, name.rpartition(".")[2]
        return types.get(f"/{name}".lower()) or types.get(f".{extension}".lower(), "")

    @cached_property
    def _content_types(self) -> dict[str, str]:
        """Media types by the name of a part, "/word/a.xml", or by extension, ".xml"."""
        types = dict[str, str]()
        with suppress(DamagedPart):
            for element in self.xml("[Content_Types].xml"):
                name = element.get("PartName") or f".{element.get('Extension')}"
                types[name.lower()] = element.get("ContentType", "").lower()
        return types

    def xml(self, name: str) -> Element:
        """Parse a part. Raises DamagedPart.

        Known namespaces are replaced by the usual prefix (`element.tag == "w:p"`), others are removed. Attributes have
        no prefix, except that of relations ("r:id").
        """
        try:
            root: Element = self._parser.fromstring(self.data(name))
        except (ParseError, ValueError, LookupError) as error:
            raise DamagedPart(name) from error
        return _shortened(root)

    def blocks(self, name: str, parent: str) -> Iterator[Element]:
        """Parse a part bit by bit and yield the children of an element, such as "w:body", as soon as they are complete.

        Raises DamagedPart after the last readable one, of which a part may be missing. See `xml` for names.
        """
        outside = found = Element(parent)
        damage = None
        try:
            with self._archive.open(self._entries[name.lower()]) as file:
                for _, element in self._parser.iterparse(file, ("start",)):
                    while len(found) > 1:  # the parser is beyond all children but the last one
                        yield _shortened(found[0])
                        del found[0]
                    if found is outside and _short(element.tag) == parent:
                        found = element
        except (*_READ_ERRORS, ParseError, ValueError, LookupError) as error:
            damage = error
        yield from map(_shortened, found)
        if damage is not None:
            raise DamagedPart(name) from damage

    def relations(self, name: str) -> dict[str, Relation]:
        """Return the relations of a part by identifier; {} if they are missing or damaged. "" is the package."""
        folder, base = posixpath.split(name)
        file = posixpath.join(folder, "_rels", f"{base}.rels")
        with suppress(DamagedPart):
            found = self.xml(file).iter("Relationship")
            return {element.get("Id", ""): _relation(element, folder) for element in found}
        return {}

    def related(self, name: str, kind: str) -> list[str]:
        """Return the existing parts to which a part has relations of a kind."""
        found = (r.target for r in self.relations(name).values() if r.kind == kind and not r.external)
        return [target for target in dict.fromkeys(found) if target in self]


def child(element: Element | None, *names: str) -> Element | None:
    """Return the first descendant on a path of names, None if there is none.

    ElementTree's own paths do not take short names, but its searches for one name do.
    """
    if element is None or not names:
        return element
    found = (child(inner, *names[1:]) for inner in element.findall(names[0]))
    return next((inner for inner in found if inner is not None), None)


def integer(text: str | None, default: int = 0) -> int:
    """Return the integer of an attribute, `default` if it is missing or not a number."""
    try:
        return min(max(int(text or default), -_LARGEST), _LARGEST)
    except ValueError:
        return default


def outermost(element: Element, *names: str) -> Iterator[Element]:
    """Yield the descendants with one of these names, except those within each other."""
    waiting = [element]
    while waiting:
        waiting += reversed(waiting.pop())
        while waiting and waiting[-1].tag in names:
            yield waiting.pop()


def _shortened(root: Element) -> Element:
    """Replace namespaces in the names of an element and those below it."""
    for element in root.iter():
        element.tag = _short(element.tag)
        if "{" in "".join(element.attrib):
            element.attrib = {_short_attribute(key): value for key, value in element.attrib.items()}
    return root


def _relation(element: Element, folder: str) -> Relation:
    kind, target = element.get("Type", "").rpartition("/")[2], element.get("Target", "")
    if element.get("TargetMode") == "External":
        return Relation(kind, target, external=True)
    path = unquote(target.replace("\\", "/")).partition("#")[0]
    return Relation(kind, posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/"))


@lru_cache(4096)
def _short(name: str) -> str:
    address, _, local = name[1:].rpartition("}") if name.startswith("{") else ("", "", name)
    prefix = _PREFIXES.get(address)
    return f"{prefix}:{local}" if prefix else local


def _short_attribute(name: str) -> str:
    short = _short(name)
    return short if short.startswith("r:") else short.rpartition(":")[2]
