"""Workbooks written part by part, for what no library writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import files

TRANSITIONAL = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
STRICT = "http://purl.oclc.org/ooxml/spreadsheetml/main"
_RELATIONS = {
    TRANSITIONAL: "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    STRICT: "http://purl.oclc.org/ooxml/officeDocument/relationships",
}
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
DRAWING = (
    '<xdr:wsDr xmlns:xdr="http://schemas.openxmlformats.org/drawingml/2006/spreadsheetDrawing" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">{}</xdr:wsDr>'
)
SHAPE = "<xdr:sp><xdr:txBody><a:p><a:r><a:t>{}</a:t></a:r></a:p></xdr:txBody></xdr:sp>"


def cell(reference: str, value: str | float | None, *, kind: str = "", style: int = 0, formula: str = "") -> str:
    """A cell. A text is written inline unless a kind (attribute t) is given."""
    shown = f"<f>{formula}</f>" if formula else ""
    if isinstance(value, str) and not kind:
        kind, shown = "inlineStr", f"{shown}<is><t>{escape(value)}</t></is>"
    elif value is not None:
        shown += f"<v>{escape(str(value))}</v>"
    return f'<c r="{reference}" s="{style}"' + (f' t="{kind}"' if kind else "") + f">{shown}</c>"


def rows(*values: Sequence[str | float | None], begin: int = 1) -> str:
    """Rows below each other; None is a cell that is not there, a text "<c ..." is the XML of a cell."""
    found = ""
    for number, row in enumerate(values, begin):
        cells = (
            value
            if isinstance(value, str) and value.startswith("<c ")
            else cell(f"{'ABCDEFGH'[column]}{number}", value)
            for column, value in enumerate(row)
            if value is not None
        )
        found += f'<row r="{number}">{"".join(cells)}</row>'
    return found


def relations(targets: Mapping[str, str], namespace: str = TRANSITIONAL) -> str:
    """Relations r1, r2, ...: target -> kind."""
    items = (
        f'<Relationship Id="r{number}" Type="{_RELATIONS[namespace]}/{kind}" Target="{target}"/>'
        for number, (target, kind) in enumerate(targets.items(), 1)
    )
    return f'<Relationships xmlns="{_PACKAGE}">{"".join(items)}</Relationships>'


def workbook(
    sheets: Mapping[str, str],
    parts: Mapping[str, str] | None = None,
    *,
    namespace: str = TRANSITIONAL,
    more: Mapping[str, str] | None = None,
    properties: str = "",
) -> bytes:
    """A workbook.

    sheets: name -> rows, and what follows </sheetData>.
    parts: name -> XML of other parts.
    more: target -> kind of further relations of the workbook.
    """
    listed, targets, written = "", dict[str, str](), dict[str, str]()
    for number, (name, content) in enumerate(sheets.items(), 1):
        listed += f'<sheet name="{name}" sheetId="{number}" r:id="r{number}"/>'
        targets[f"worksheets/sheet{number}.xml"] = "worksheet"
        data = content if "<sheetData" in content else f"<sheetData>{content}</sheetData>"
        written[f"xl/worksheets/sheet{number}.xml"] = f'<worksheet xmlns="{namespace}">{data}</worksheet>'
    book = f'<workbook xmlns="{namespace}" xmlns:r="{_RELATIONS[namespace]}">{properties}<sheets>{listed}</sheets></workbook>'
    return files.packed(
        {
            "_rels/.rels": relations({"xl/workbook.xml": "officeDocument"}, namespace),
            "xl/workbook.xml": book,
            "xl/_rels/workbook.xml.rels": relations({**targets, **(more or {})}, namespace),
            **written,
            **(parts or {}),
        }
    )


def styles(*codes: str) -> str:
    """Styles of cells: style n has the number format codes[n - 1]; style 0 has none."""
    formats = "".join(f'<numFmt numFmtId="{200 + n}" formatCode="{escape(code, {chr(34): "&quot;"})}"/>' for n, code in enumerate(codes))  # fmt: skip
    cells = "".join(f'<xf numFmtId="{200 + n}"/>' for n in range(len(codes)))
    return (
        f'<styleSheet xmlns="{TRANSITIONAL}"><numFmts>{formats}</numFmts><fills><fill/></fills>'
        f'<cellXfs><xf numFmtId="0"/>{cells}</cellXfs></styleSheet>'
    )
