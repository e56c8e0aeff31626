"""Presentations, written as XML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import files

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
STRICT = {
    "http://schemas.openxmlformats.org/officeDocument/2006/relationships": "http://purl.oclc.org/ooxml/officeDocument/relationships",
    "http://schemas.openxmlformats.org/presentationml/2006/main": "http://purl.oclc.org/ooxml/presentationml/main",
    "http://schemas.openxmlformats.org/drawingml/2006/main": "http://purl.oclc.org/ooxml/drawingml/main",
    "http://schemas.openxmlformats.org/drawingml/2006/chart": "http://purl.oclc.org/ooxml/drawingml/chart",
}
"""Namespaces of Transitional Open XML -> those of Strict Open XML."""
NAMESPACES = (
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart" xmlns:dgm="http://schemas.openxmlformats.org/drawingml/2006/diagram" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" xmlns:p188="http://schemas.microsoft.com/office/powerpoint/2018/8/main" '
    f'xmlns:cx="http://schemas.microsoft.com/office/drawing/2014/chartex" xmlns:r="{OFFICE}"'
)
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


@dataclass(frozen=True)
class Slide:
    """Shapes of a slide, and the parts related to it: identifier -> (kind, XML)."""

    shapes: Sequence[str] = ()
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)


def presentation(*slides: Slide, parts: dict[str, tuple[str, str]] | None = None) -> bytes:
    """Return a presentation. parts: those related to the presentation itself."""
    main = {f"s{n}": ("slide", slide_xml(*slide.shapes)) for n, slide in enumerate(slides, 1)}
    identifiers = "".join(f'<p:sldId id="{256 + n}" r:id="s{n}"/>' for n in range(1, len(slides) + 1))
    found = {
        "_rels/.rels": _relations({"r1": ("officeDocument", "/ppt/presentation.xml")}),
        "ppt/presentation.xml": f"<p:presentation {NAMESPACES}><p:sldIdLst>{identifiers}</p:sldIdLst></p:presentation>",
    }
    _add(found, "ppt/presentation.xml", main | (parts or {}))
    for n, slide in enumerate(slides, 1):
        _add(found, f"ppt/slides/slide{n}.xml", slide.parts)
    return files.packed(found)


def _add(found: dict[str, str], name: str, parts: dict[str, tuple[str, str]]) -> None:
    targets = dict[str, tuple[str, str]]()
    for identifier, (kind, xml) in parts.items():
        number = len([other for other in found if other.startswith(f"ppt/{kind}s/")]) + 1
        path = f"ppt/{kind}s/{kind}{number}.xml"
        found[path] = xml
        targets[identifier] = kind, f"/{path}"
    folder, _, base = name.rpartition("/")
    found[f"{folder}/_rels/{base}.rels"] = _relations(targets)


def _relations(targets: dict[str, tuple[str, str]]) -> str:
    one = '<Relationship Id="{}" Type="{}/{}" Target="{}"/>'
    inner = "".join(one.format(identifier, OFFICE, *target) for identifier, target in targets.items())
    return f'<Relationships xmlns="{_PACKAGE}">{inner}</Relationships>'


def slide_xml(*shapes: str, tag: str = "p:sld") -> str:
    tree = f"<p:cSld><p:spTree>{''.join(shapes)}</p:spTree></p:cSld>"
    return f'<?xml version="1.0" encoding="UTF-8"?><{tag} {NAMESPACES}>{tree}</{tag}>'


def paragraphs(*texts: str) -> str:
    return "".join(f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>" for text in texts)


def shape(body: str, *, kind: str = "", index: str = "", box: tuple[int, int, int, int] | None = None) -> str:
    """A shape with these paragraphs. box: left, top, width, height."""
    attributes = f"{kind and f' type={kind!r}'}{index and f' idx={index!r}'}"
    placeholder = f"<p:ph{attributes}/>" if attributes else ""
    return (
        f"<p:sp><p:nvSpPr><p:nvPr>{placeholder}</p:nvPr></p:nvSpPr><p:spPr>{_frame('a', box)}</p:spPr>"
        f"<p:txBody>{body}</p:txBody></p:sp>"
    )


def text(words: str, box: tuple[int, int, int, int] | None = None, **placeholder: str) -> str:
    return shape(paragraphs(words), box=box, **placeholder)


def frame(content: str, box: tuple[int, int, int, int] | None = None) -> str:
    """A graphic frame."""
    return f"<p:graphicFrame>{_frame('p', box)}<a:graphic><a:graphicData>{content}</a:graphicData></a:graphic></p:graphicFrame>"


def group(*shapes: str, box: tuple[int, int, int, int] | None = None) -> str:
    return f"<p:grpSp><p:grpSpPr>{_frame('a', box)}</p:grpSpPr>{''.join(shapes)}</p:grpSp>"


def _frame(prefix: str, box: tuple[int, int, int, int] | None) -> str:
    if box is None:
        return ""
    x, y, width, height = box
    return f'<{prefix}:xfrm><a:off x="{x}" y="{y}"/><a:ext cx="{width}" cy="{height}"/></{prefix}:xfrm>'


def table(*rows: Sequence[str]) -> str:
    """A table. A cell "<" or "^" is merged with the one to the left or above."""
    merged = {"<": ' hMerge="1"', "^": ' vMerge="1"'}
    cell = "<a:tc{}><a:txBody>{}</a:txBody></a:tc>"
    inner = (
        "".join(cell.format(merged.get(one, ""), paragraphs("" if one in merged else one)) for one in row)
        for row in rows
    )
    return frame(f"<a:tbl>{''.join(f'<a:tr>{row}</a:tr>' for row in inner)}</a:tbl>")


def chart(
    title: str, series: dict[str, Sequence[str]], categories: Sequence[str], *, axis: str = "", code: str = "General"
) -> str:
    """A chart part with saved values; "" is a missing value."""

    def points(values: Sequence[str]) -> str:
        return "".join(f'<c:pt idx="{n}"><c:v>{value}</c:v></c:pt>' for n, value in enumerate(values) if value)

    def titled(words: str) -> str:
        return f"<c:title><c:tx><c:rich>{paragraphs(words)}</c:rich></c:tx></c:title>" if words else ""

    inner = "".join(
        f"<c:ser><c:tx><c:strRef><c:strCache>{points([name])}</c:strCache></c:strRef></c:tx>"
        f"<c:cat><c:strRef><c:strCache>{points(categories)}</c:strCache></c:strRef></c:cat>"
        f"<c:val><c:numRef><c:numCache><c:formatCode>{code}</c:formatCode>{points(values)}</c:numCache></c:numRef></c:val></c:ser>"
        for name, values in series.items()
    )
    plot = f"<c:plotArea><c:barChart>{inner}</c:barChart><c:catAx>{titled(axis)}</c:catAx></c:plotArea>"
    return f"<c:chartSpace {NAMESPACES}><c:chart>{titled(title)}{plot}</c:chart></c:chartSpace>"


def diagram(texts: dict[str, str], links: Sequence[tuple[str, str]]) -> str:
    """A SmartArt data part. texts: point -> text; links: pairs of outer and inner point."""
    points = "".join(
        f'<dgm:pt modelId="{name}"><dgm:t>{paragraphs(words)}</dgm:t></dgm:pt>' for name, words in texts.items()
    )
    lines = "".join(f'<dgm:cxn srcId="{a}" destId="{b}" srcOrd="{n}"/>' for n, (a, b) in enumerate(links))
    return (
        f"<dgm:dataModel {NAMESPACES}><dgm:ptLst>{points}</dgm:ptLst><dgm:cxnLst>{lines}</dgm:cxnLst></dgm:dataModel>"
    )


def notes(*texts: str) -> str:
    shapes = [shape(paragraphs(*texts), kind="body", index="1"), text("7", kind="sldNum")]
    return slide_xml(*shapes, tag="p:notes")


def strict(data: bytes) -> bytes:
    """Return the presentation with the namespaces of Strict Open XML."""
    import io
    import zipfile

    archive = zipfile.ZipFile(io.BytesIO(data))
    found = {name: archive.read(name).decode() for name in archive.namelist()}
    for old, new in STRICT.items():
        found = {name: xml.replace(old, new) for name, xml in found.items()}
    return files.packed(found)
