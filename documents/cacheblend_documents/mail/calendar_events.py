"""Events and tasks of iCalendar files as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cacheblend_documents.converted import Converted
from cacheblend_documents.plain_text import decoded

_COMPONENTS = frozenset(("VEVENT", "VTODO", "VJOURNAL"))
_LABELS = {
    "SUMMARY": "Event", "DTSTART": "Start", "DTEND": "End", "DUE": "Due", "DURATION": "Duration", "RRULE": "Repeats", "LOCATION": "Location",
    "ORGANIZER": "Organizer", "ATTENDEE": "Attendee", "STATUS": "Status", "DESCRIPTION": "Description",
}  # fmt: skip
_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)(Z?))?")
_ESCAPED = re.compile(r"\\([nN,;\\])")
_ZONE = re.compile(r'TZID="?([^":;]+)')
_QUOTED = re.compile('"[^"]*"?')
_NAME = re.compile(r'CN=(?:"([^"]*)"|([^":;]+))')


def from_calendar(data: bytes) -> Converted:
    return Converted(events_text(decoded(data)), keeps_lines=False)


def events_text(calendar: str) -> str:
    """Return the properties of each event: summary, time, place, people and description."""
    events, components = list[list[tuple[str, str]]](), list[str]()
    for name, parameters, value in properties(calendar):
        if name == "BEGIN":
            components.append(value.upper())
            if components[-1] in _COMPONENTS:
                events.append([])
        elif name == "END":
            if components:
                components.pop()
        elif components and components[-1] in _COMPONENTS and name in _LABELS:
            events[-1].append((_LABELS[name], _value(name, parameters, value).strip()))
    order = list(_LABELS.values())
    lines = (sorted(event, key=lambda line: order.index(line[0])) for event in events)
    return "\n\n".join("\n".join(f"{label}: {text}" for label, text in event if text) for event in lines)


def properties(calendar: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, parameters and value of each property of an iCalendar or vCard file.

    A line that begins with a blank continues the one before.
    """
    line = list[str]()
    for part in [*calendar.splitlines(), ""]:
        if line and part.startswith((" ", "\t")):
            line.append(part[1:])
            continue
        whole, line = "".join(line), [part]
        start = _QUOTED.sub(lambda quoted: "." * len(quoted[0]), whole).find(":")
        if start >= 0:
            name, _, parameters = whole[:start].partition(";")
            yield name.strip().upper(), parameters, whole[start + 1 :]


def _value(name: str, parameters: str, value: str) -> str:
    if (name in ("DTSTART", "DTEND", "DUE")) and (time := _TIME.fullmatch(value.strip())):
        year, month, day, hour, minute, _, utc = time.groups()
        zone = _ZONE.search(parameters)
        place = " UTC" if utc else f" {zone[1]}" if zone else ""
        return f"{year}-{month}-{day}" + (f" {hour}:{minute}{place}" if hour else "")
    if name in ("ORGANIZER", "ATTENDEE"):
        address = value.strip()
        address = address[7:] if address.lower().startswith("mailto:") else address
        found = _NAME.search(parameters)
        person = (found[1] or found[2] or "") if found else ""
        return f"{person} <{address}>" if person and person != address else address
    return unescaped(value)


def unescaped(value: str) -> str:
    """Return the text of a value: "\\n" is a line end, "\\," a comma."""
    return _ESCAPED.sub(lambda escaped: "\n" if escaped[1] in "nN" else escaped[1], value)
