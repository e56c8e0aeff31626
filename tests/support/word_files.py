"""Word documents with chosen XML: paragraphs, runs, and further parts such as styles and comments."""

from __future__ import annotations

import files

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_NAMES = (
    f'xmlns:w="{WORD}" xmlns:r="{OFFICE}/relationships" xmlns:m="{OFFICE}/math" '
    'xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:v="urn:schemas-microsoft-com:vml" xmlns:o="urn:schemas-microsoft-com:office:office"'
)
_ROOTS = {"header": "hdr", "footer": "ftr"}


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(content: str = "", style: str = "", properties: str = "") -> str:
    """A paragraph of runs, or of text if the content has no elements."""
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f"<w:p><w:pPr>{named}{properties}</w:pPr>{content if '<' in content else run(content)}</w:p>"


def cell(content: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{content if '<' in content else paragraph(content)}</w:tc>"


def row(*cells: str) -> str:
    """A row of cells, or of their texts."""
    return f"<w:tr>{''.join(one if '<' in one else cell(one) for one in cells)}</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl>{''.join(rows)}</w:tbl>"


def in_list(text: str, num_id: int | str, level: int = 0) -> str:
    return paragraph(text, properties=f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{num_id}"/></w:numPr>')


def style(name: str, properties: str = "", *, based_on: str = "", called: str = "") -> str:
    """A paragraph style. called: its name, if it differs from its identifier."""
    return (
        f'<w:style w:type="paragraph" w:styleId="{name}"><w:name w:val="{called or name}"/><w:basedOn w:val="{based_on}"/>'
        f"<w:pPr>{properties}</w:pPr></w:style>"
    )


def list_level(number: int, text: str, form: str = "decimal", more: str = "") -> str:
    return f'<w:lvl w:ilvl="{number}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/></w:lvl>'


def numbering(*definitions: str, lists: str = "") -> str:
    """Numbering with list n + 1 of definition n. lists: further <w:num> elements."""
    abstract = "".join(
        f'<w:abstractNum w:abstractNumId="{n}">{levels}</w:abstractNum>' for n, levels in enumerate(definitions)
    )
    own = "".join(f'<w:num w:numId="{n + 1}"><w:abstractNumId w:val="{n}"/></w:num>' for n, _ in enumerate(definitions))
    return abstract + own + lists


def xml(root: str, content: str) -> str:
    return f"<w:{root} {_NAMES}>{content}</w:{root}>"


def word(body: str, strict: bool = False, **parts: str) -> bytes:
    """A Word document. parts: content of "styles", "numbering", "comments", "footnotes", "header", "header2", ..."""
    contents = {"word/document.xml": xml("document", f"<w:body>{body}</w:body>")}
    related = ""
    for name, content in parts.items():
        kind = name.rstrip("0123456789")
        contents[f"word/{name}.xml"] = xml(_ROOTS.get(kind, kind), content)
        related += f'<Relationship Id="{name}" Type="{OFFICE}/relationships/{kind}" Target="{name}.xml"/>'
    contents["word/_rels/document.xml.rels"] = f'<Relationships xmlns="{PACKAGE}">{related}</Relationships>'
    contents["_rels/.rels"] = (
        f'<Relationships xmlns="{PACKAGE}"><Relationship Id="r1" Type="{OFFICE}/relationships/officeDocument" '
        'Target="word/document.xml"/></Relationships>'
    )
    if strict:
        for name, text in contents.items():
            contents[name] = text.replace(WORD, "http://purl.oclc.org/ooxml/wordprocessingml/main").replace(
                f"{OFFICE}/relationships", "http://purl.oclc.org/ooxml/officeDocument/relationships"
            )
    return files.packed(contents)
