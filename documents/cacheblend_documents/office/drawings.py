"""Charts and SmartArt diagrams of Office files, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from xml.etree.ElementTree import Element

from cacheblend_documents.converted import shortened
from cacheblend_documents.number_formats import cell_text
from cacheblend_documents.office.drawing_text import body_text, resolve_alternatives
from cacheblend_documents.office.package import (
    DamagedPart,
    OfficePackage,
    Relation,
    child,
    integer,
    outermost,
)
from cacheblend_documents.omissions import Omissions

_AXES = frozenset(("c:catAx", "c:dateAx", "c:valAx", "c:serAx", "axis"))
_MOST_LEVELS = 16  # of the categories of a chart
DRAWN = {"chart": "chart", "chartEx": "chart", "diagramData": "diagram"}
"""Kind of relation to a drawing -> name of what is drawn."""


def drawn_text(package: OfficePackage, relation: Relation | None, thing: str, omissions: Omissions, place: str) -> str:
    """Return the text of a related chart or diagram, "" if it was given before.

    A drawing without text, or a chart without values, is an omission. thing: "chart" or "diagram".
    """
    text = ""
    if relation is not None and not relation.external:
        if relation.target in package.drawn:
            return ""
        package.drawn.add(relation.target)
        with suppress(DamagedPart):
            root = resolve_alternatives(package.xml(relation.target))
            text = chart_text(root) if thing == "chart" else diagram_text(root)
    if not text or (thing == "chart" and "\n" not in text):  # a chart with values has two lines
        omissions.add(thing, place)
    return text


def diagram_text(root: Element) -> str:
    """Return the points of a SmartArt data model as a list, in the order of the file; "" without text."""
    points = (" ".join(body_text(point).split()) for point in outermost(root, "dgm:pt"))
    return "\n".join(f"- {text}" for text in points if text)


@dataclass
class _Series:
    """Series of a chart. categories and values: place -> text."""

    name: str
    categories: Mapping[int, str]
    values: Mapping[int, str]


def chart_text(root: Element) -> str:
    """Return the title of a chart and a line for each category, with the values that the application saved.

    root: c:chartSpace, or cx:chartSpace of newer charts. "" if there is neither title nor value.
    """
    extended = root.tag != "c:chartSpace"
    series = list(_extended_series(root) if extended else _series(root))
    title = _rich(child(root, *(("chart", "title") if extended else ("c:chart", "c:title"))))
    axes = [(axis.tag, _rich(axis.find("title" if extended else "c:title"))) for axis in outermost(root, *_AXES)]
    if len(series) == 1 and series[0].name not in ("", title):
        title = f"{title} ({series[0].name})" if title else series[0].name
    category = next((name for tag, name in axes if name and tag in ("c:catAx", "c:dateAx")), "")
    is_record = len(series) > 1 and all(s.categories == series[0].categories for s in series)
    lines = [f"Axis: {name}" for _, name in axes if name and not (is_record and name == category)]
    lines += _records(series, category) if is_record else _lists(series)
    lines += [f"Label: {label}" for element in outermost(root, "c:dLbl") if (label := _rich(element))]
    return "\n".join([f"Chart: {title}" if title else "Chart", *lines]) if title or lines else ""


def _records(series: Sequence[_Series], category: str) -> list[str]:
    """Return a line for each category with the values of all series."""
    labels = series[0].categories
    rows: dict[int, list[str]] = {place: [] for place in labels}
    for one in series:
        for place, value in one.values.items():
            rows.setdefault(place, []).append(f"{one.name}: {value}" if one.name else value)
    before = f"{category}: " if category else ""
    return [", ".join([before + labels.get(place, f"{place + 1}"), *row]) for place, row in sorted(rows.items())]


def _lists(series: Sequence[_Series]) -> list[str]:
    """Return a line for each point, below the names of the series if there are many."""
    lines = list[str]()
    for one in series:
        lines += [f"{one.name}:"] if len(series) > 1 and one.name else []
        for place in sorted(one.categories.keys() | one.values.keys()):
            found = one.categories.get(place), one.values.get(place)
            lines.append(": ".join(text for text in found if text))
    return lines


def _rich(element: Element | None) -> str:
    """Return the text of a title or label on one line."""
    if element is None:
        return ""
    text = body_text(element) or "\n".join(_points(element.find("c:tx")).values())
    return shortened(" ".join(text.split()))


def _series(root: Element) -> Iterator[_Series]:
    is_1904 = any(e.get("val") in (None, "1", "true") for e in root.iter("c:date1904"))
    for element in outermost(root, "c:ser"):
        tx = element.find("c:tx")
        name = " ".join(_points(tx).values()) or (tx.findtext("c:v", "") if tx is not None else "")
        categories, values, sizes = (
            _points(next((inner for inner in element if inner.tag in tags), None), is_1904)
            for tags in (("c:cat", "c:xVal"), ("c:val", "c:yVal"), ("c:bubbleSize",))
        )
        for place, size in sizes.items():
            values[place] = f"{values.get(place, '')} (size {size})".lstrip()
        yield _Series(shortened(" ".join(name.split())), categories, values)


def _points(element: Element | None, is_1904: bool = False) -> dict[int, str]:
    """Return the saved points. Those of categories with levels are joined, the outer level first."""
    if element is None:
        return {}
    if levels := list(islice(outermost(element, "c:lvl"), _MOST_LEVELS)):
        return _joined([_cached(level, is_1904) for level in levels])
    caches = ("c:strCache", "c:numCache", "c:strLit", "c:numLit")
    return next((_cached(cache, is_1904) for cache in element.iter() if cache.tag in caches), {})


def _joined(levels: Sequence[dict[int, str]]) -> dict[int, str]:
    """Join the levels of categories. levels: the innermost first; a point of an outer one holds until the next."""
    found = dict(levels[0])
    for level in levels[1:]:
        outer = ""
        for place in sorted(found.keys() | level.keys()):
            outer = shortened(level.get(place, outer))
            if place in found and outer:
                found[place] = f"{outer} {found[place]}"
    return found


def _cached(cache: Element, is_1904: bool) -> dict[int, str]:
    code = cache.findtext("c:formatCode", "")
    points = ((point, point.findtext("c:v", "").strip()) for point in outermost(cache, "c:pt"))
    is_number = cache.tag.startswith("c:num")
    return {
        integer(point.get("idx")): cell_text(text, point.get("formatCode", code), is_1904=is_1904)
        if is_number
        else text
        for point, text in points
        if text
    }


def _extended_series(root: Element) -> Iterator[_Series]:
    """Yield the series of a cx:chartSpace, whose namespace has no prefix."""
    names = {e.get("val"): s for s in root.iter("series") for e in s.iterfind("dataId")}
    for data in root.iter("data"):
        series = names.get(data.get("id"))
        name = "" if series is None else " ".join(t.text or "" for t in series.iterfind("tx/txData/v"))
        levels = [_extended_points(level) for level in data.iterfind("strDim/lvl")]
        values = [_extended_points(level) for level in data.iterfind("numDim/lvl")]
        yield _Series(shortened(name), _joined(levels) if levels else {}, values[0] if values else {})


def _extended_points(level: Element) -> dict[int, str]:
    return {integer(point.get("idx")): (point.text or "").strip() for point in level.iterfind("pt")}
