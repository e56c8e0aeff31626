"""XML: paragraphs of prose, named values of data, the declared encoding, entities within bounds."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import hostile
import pytest
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.web.xml import from_xml
from files import write

GUIDE = """<?xml version="1.0" encoding="ISO-8859-1"?>
<!DOCTYPE book [<!ENTITY product "Kaldur 7">]>
<book><title>Guide to &product;</title><chapter id="c1"><title>Filling <em>it</em></title>
<para>Fill with <quantity>nine</quantity> litres
of kølevæske:<list><item>slowly</item><item>to <i>the</i> line</item></list></para><para>Close it.</para>
<row><entry>Hall 3</entry><entry>Tue</entry></row></chapter></book>"""


def test_prose_is_paragraphs_with_headings_in_the_declared_encoding() -> None:
    text = "# Guide to Kaldur 7\n\n## Filling it\n\nFill with nine litres of kølevæske:\nslowly\nto the line\nClose it.\nHall 3 | Tue"
    assert from_xml(GUIDE.encode("latin-1")).text == text
    assert from_xml(GUIDE.encode()).text == text, "UTF-8, whatever it declares"
    assert from_xml(GUIDE.replace("ISO-8859-1", "UTF-16").encode("utf-16")).text == text
    assert (
        from_xml("<?xml version='1.0' encoding='ISO-8859-5'?><a>Дл<b>я</b> 3</a>".encode("iso-8859-5")).text == "Для 3"
    )


def test_data_is_values_with_names_and_attributes() -> None:
    page = (
        '<catalog xmlns="urn:a" version="2"><item sku="A1"><x:name xmlns:x="urn:b">Kettle</x:name><price currency="EUR">19</price></item>'
        '<item><name>Pot &amp; lid</name><price/></item><pt lat="1" lon="2"/></catalog>'
    )
    assert from_xml(page.encode()).text == (
        "catalog: version: 2\n\nitem: sku: A1\nname: Kettle\nprice: 19, currency: EUR\n\nname: Pot & lid\n\npt: lat: 1, lon: 2"
    )


def test_pages_in_feeds_are_text_and_other_markup_in_text_stays() -> None:
    feed = "<rss><item><title>Hall&nbsp;3</title><description>&lt;p>Open until &lt;b>18&lt;/b>.&lt;/p></description><code>&lt;p></code></item></rss>"
    assert from_xml(feed.encode()).text == "title: Hall 3\ndescription: Open until 18.\ncode: <p>"


def test_what_cannot_be_read_is_an_omission() -> None:
    picture = base64.b64encode(random.Random(1).randbytes(3000)).decode()
    found = from_xml(
        f"<!DOCTYPE a SYSTEM 'a.dtd' [<!ENTITY one SYSTEM 'one.xml'>]>\n<a><b>caf&eacute;</b>&one;<c>&other;</c><d>{picture}</d>\n"
        "<e>left</e><f>R & D</f><g>lost</g></a>".encode()
    )
    assert found.text == "b: café\ne: left\nf: R"
    assert found.omissions == (
        "1 text in another file (one.xml)", "1 entity without a text (other)", "1 element with base64 data",
        "what follows line 3, which is not well-formed XML",
    )  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"no XML", b"{}", b"\0\1", b"<?xml version='1.0'?>"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(NotConverted, match="not XML"):
        from_xml(data)


def test_entities_neither_grow_nor_open_files(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "the harbor key is 4711")
    for entities in (hostile.LAUGHS, f'<!DOCTYPE a [<!ENTITY e "{"x" * 100_000}">]>'):
        with pytest.raises(NotConverted, match="long or nested"):
            from_xml(f"{entities}<a>{'&e;' * 1000}</a>".encode())
    assert from_xml(f"{hostile.external(secret.as_uri())}<a>&e;</a>".encode()).text == ""
