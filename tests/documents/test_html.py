"""Text of web pages: words stay whole and apart, tables keep their columns, lists their numbers."""

from __future__ import annotations

import codecs

import pytest
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.web.html import from_html, html_text


def text_of(page: str) -> str:
    return from_html(page.encode()).text.strip("\n")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<h1>Opening<br>hours</h1>", "# Opening hours"),
        ("<p><b>183 Main St<br>East Copper<br>Ohio</b></p>", "183 Main St\nEast Copper\nOhio"),
        ("<p><b>Monday<br/></b><b>Closed</b></p>", "Monday\nClosed"),
        ("<ul><li><em>12 High St<br>Bergen</em></ul>", "- 12 High St\n  Bergen"),
        ("<p>Stra\u00adßen\u200bbahn", "Straßenbahn"),
        ("<p>a<span><i><div>b</div></i></span>c", "a\n\nb\n\nc"),
        ("<h2><div>Opening</div><div>hours</div></h2>", "## Opening hours"),
        ("<dl><dt>Fee<dd>Two euros<dt>Fine<dd>Nine euros</dl>", "Fee\nTwo euros\n\nFine\nNine euros"),
        ("<details><summary>Why?</summary>Because.</details>", "Why?\n\nBecause."),
        ("<h3><button>Who pays?</button></h3><p>We do.", "### Who pays?\n\nWe do."),
        ("<pre>a<br>b <code>c</code></pre>", "```\na\nb c\n```"),
        ("<p><code>a<kbd>b</kbd></code> and <code>`</code>", "`ab` and `"),
    ],
)
def test_words_are_neither_joined_nor_split(page: str, text: str) -> None:
    assert text_of(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("10<sup>6</sup> and 10<sup>\u22126</sup> and 2<sup>n</sup>", "10^6 and 10^\u22126 and 2^n"),
        ("2<sup>n+1</sup>, 9<sup>2 </sup>cm, <sup>1</sup> x", "2^(n+1), 9^2 cm, 1 x"),
        ("5 m<sup>2</sup>, H<sub>2</sub>O", "5 m^2, H2O"),
        ("the 1<sup>st</sup>, le 1<sup>er</sup>, 3<sup>e</sup>", "the 1st, le 1er, 3e"),
        ("in 2024<sup><a href=#f>1</a></sup>, Acme<sup>TM</sup>", "in 2024[1], AcmeTM"),
        ("in 2024<sup class=reference><a href=#f>[1]</a></sup>", "in 2024[1]"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢(kan)"),
        ("<math alttext='{\\displaystyle E=mc^2}'><mi>E</mi></math>", "E=mc^2"),
        ("<math><mi>x</mi><annotation encoding='application/x-tex'>x_1</annotation></math>", "x_1"),
        ("<math><msup><mi>x</mi><mn>10</mn></msup><mo>+</mo><msubsup><mi>a</mi><mi>i</mi><mi>j</mi></msubsup></math>",
         "x^10+a_i^j"),
        ("<math><mfrac><mn>1</mn><msqrt><mi>x</mi></msqrt></mfrac><mtext> for </mtext><mroot><mi>y</mi><mn>3</mn></mroot></math>",
         "1/sqrt(x) for sqrt[3](y)"),
    ],
)  # fmt: skip
def test_superscripts_and_formulas_are_text(page: str, text: str) -> None:
    assert text_of(f"<p>{page}</p>") == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>Fee <s>40 euros</s> 55 euros.", "Fee ~~40 euros~~ 55 euros."),
        ("<p>Deposit <del>100</del> <ins>150</ins>, <strike>late</strike>", "Deposit ~~100~~ 150, ~~late~~"),
        ('<p><span style="color:red; TEXT-DECORATION: Line-Through">Fee 9.</span> None.', "~~Fee 9.~~ None."),
        ("<p><s> 10<sup>6</sup> <b>km</b> </s>a<s>b</s><s>c</s>", "~~10^6 km~~ a~~bc~~"),
        ("<p><s>~5 min<br>7</s><s> </s>", "~~\\~5 min~~\n~~7~~"),
        ("<del><p>one</p><p>two <s>three</s></p></del>four", "~~one~~\n\n~~two three~~\n\nfour"),
        ('<table><tr style="text-decoration:line-through"><td>a<td>b<tr><td>c<td>d</table>', "~~a~~ | ~~b~~\nc | d"),
        ("<ul><li><s><input type=checkbox checked> old</s><li>new</ul><pre><s>x</s>\ny</pre>",
         "- ~~[x] old~~\n- new\n\n```\n~~x~~\ny\n```"),
    ],
)  # fmt: skip
def test_struck_out_text_is_marked(page: str, text: str) -> None:
    assert text_of(page) == text


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ("<a href=' https://forms.example/a?b=c '> here </a>", "[here](https://forms.example/a?b=c)"),
        ("<a href='mailto:desk@forms.example?subject=x'>desk</a>", "[desk](desk@forms.example)"),
        ("<a href='TEL:+49-221-12'>call</a>", "[call](+49-221-12)"),
        ("<a href='tel:+49-221-12'>+49 221 12</a>", "+49 221 12"),
        ("<a href='https://www.forms.example/'>forms.example</a>", "forms.example"),
        ("<a href='https://forms.example'>forms</a>", "[forms](https://forms.example)"),
        ("<a href='#top'>a</a> <a href='/b'>b</a> <a href='javascript:c()'>c</a> <a href='mailto:?body=d'>d</a>", "a b c d"),
        (f"<a href='https://forms.example/{'x' * 300}'>session</a>", "session"),
        ("<a href='https://x.example'><img alt='The old harbour'></a>", "[The old harbour](https://x.example)"),
        ("<a href='https://x.example'><img src=a></a>none", "none"),
        ("<a href='https://x.example'><h3>Title</h3><p>text</p></a>", "### Title\n\ntext\n\n<https://x.example>"),
        ("<a href='https://x.example'><code>c</code></a> <code>d<a href='https://x.example'>e</a></code>",
         "[`c`](https://x.example) `de`"),
        ("2024<sup><a href='https://x.example'>1</a></sup>", "2024[1]"),
        ("<s><a href='https://x.example/~a'>old</a></s>", "~~[old](https://x.example/~a)~~"),
    ],
)  # fmt: skip
def test_targets_of_links_are_kept(link: str, text: str) -> None:
    assert text_of(f"<div>{link}</div>") == text


def test_targets_in_a_menu_of_the_site_are_left_out() -> None:
    menu = "<a href='https://city.example/a'>a</a> " * 60
    forms = "<a href='https://forms.example/parking'>Apply</a>"
    assert (
        text_of(f"<p>{menu}</p><p>{forms}</p>") == f"{'a ' * 60}".strip() + "\n\n[Apply](https://forms.example/parking)"
    )


def test_images_are_read_where_there_is_no_other_text() -> None:
    assert text_of("<h1><img alt='Acme Travel'></h1><p><img alt=decoration>text") == "# Acme Travel\n\ntext"
    assert text_of("<a href=a><img alt='The harbour in 1900'></a> <a><img alt=next></a>") == "The harbour in 1900"


def test_tables_keep_words_and_columns() -> None:
    cells = "<tr><td><b>K</b>ettle</td><td>1<span>,</span>290 <i>NOK</i><br>net</td><td></td><td><p>a</p><p>b</p></td>"
    assert text_of(f"<table>{cells}</table>") == "Kettle | 1,290 NOK net |  | a b"
    rows = (
        "<tr><th>Room<th>Day<th>Nurse<tr><td rowspan=2>Ward 3<td>Mon<td>Ida<tr><td>Tue<td rowspan=3>Per"
        "<tr><td colspan=2>All<tr><td>Ward 4<td>Wed<tr><td colspan=3>End"
    )
    assert text_of(f"<table>{rows}</table>").splitlines() == [
        "Room | Day | Nurse", "Ward 3 | Mon | Ida", "Ward 3 | Tue | Per", "All | All | Per", "Ward 4 | Wed | Per", "End",
    ]  # fmt: skip


def test_tables_for_layout_are_parts_of_the_page() -> None:
    inner = "<table><tr><td>Oslo<td>9</table>"
    page = f"<table><tr><td><h1>News</h1><p>One.</p><p>Two.</p><tr><td>{inner}<tr><td>End</table>"
    assert text_of(page) == "# News\n\nOne.\n\nTwo.\n\nOslo | 9\nEnd"
    columns = "<table><tr><td><h2>Left</h2>one<td><h2>Right</h2>two</table>"
    assert text_of(columns) == "## Left\n\none\n\n## Right\n\ntwo"
    assert text_of("<table><tr><td class=linenos><pre>1\n2</pre><td><pre>a\nb</pre></table>") == "```\na\nb\n```"
    prices = "<table><tr><td>Pallet<td>9 EUR<tr><td>Crate<td>85 EUR</table>"
    page = f"<table><tr><td>Start<br>Contact<td><b>Hours</b><p>Mon 7-18<br>Sat 8-12<p>Phone 0221{prices}</table>"
    assert text_of(page) == (
        "Start\nContact\n\nHours\n\nMon 7-18\nSat 8-12\n\nPhone 0221\n\nPallet | 9 EUR\nCrate | 85 EUR"
    )
    article = f"<p>{'word ' * 50}</p><p>end</p>"
    assert text_of(f"<table><tr><td>Menu<td>{article}</table>") == f"Menu\n{'word ' * 49}word\n\nend"
    framed = f"<table><tr><td>Menu<td>News<tr><td>{prices}<td>Ads</table>"
    assert text_of(framed) == "Menu\nNews\nPallet | 9 EUR\nCrate | 85 EUR\n\nAds"
    terms = "<table><tr><th>Term<th>Meaning<tr><td>A<td><p>one<p>two<tr><td>B<td>three</table>"
    assert text_of(terms) == "Term | Meaning\nA | one two\nB | three"
    assert text_of(f"<table><tr><td>{'pump ' * 20}<td>{prices}</table>").endswith(" | Pallet 9 EUR Crate 85 EUR")


def test_repeated_cells_are_bounded() -> None:
    row = "<tr>" + "<td rowspan=65534 colspan=1000>abcdefg" * 20
    page = "<table>" + row * 100
    assert len(text_of(page)) < 20 * len(page)
    wide = "<table><tr>" + "<td>a" * 2000 + "<td rowspan=65534>b" + "<tr><td>c" * 2000
    assert len(text_of(wide)) < 20 * len(wide)


def test_lists_keep_their_numbers() -> None:
    page = "<ol><li>Unplug.<li>Open.</ol><p>Wait.</p><ol start=3><li>Clean.<ul><li>soap</ul><li value=9>Close.<li>End.</ol>"
    assert text_of(page) == "1. Unplug.\n2. Open.\n\nWait.\n\n3. Clean.\n  - soap\n9. Close.\n10. End."
    assert text_of("<ol reversed><li>c<li>b<ol type=a start=26><li>x<li>y</ol></ol>") == "2. c\n1. b\n  z. x\n  aa. y"
    assert text_of("<ol type=I start=4><li>x</ol><ol start=x><li value=1e9>y</ol>") == "IV. x\n\n1. y"


def test_a_page_in_a_form_and_forms_with_text_are_read() -> None:
    asp = "<body><form><header>Menu</header><input type=search><div><h1>Holiday</h1><p>Everyone has 31 days.</p></div></form>"
    assert text_of(asp) == "# Holiday\n\nEveryone has 31 days."
    assert text_of("<p>Welcome.</p><form><h2>Holiday</h2>31 days.<button>Ok</button></form>").endswith("31 days.")
    log_in = "<form>Log in <label>Name <input></label><label>Password <input type=password></label></form>"
    search = "<form><input type=search value=word><select><option>All<option selected>Pages</select></form>"
    article = "<p>" + "Everyone has 31 days. " * 20
    assert text_of(article + log_in + search) == " ".join(["Everyone has 31 days."] * 20)


def test_fields_have_their_values() -> None:
    page = (
        "<form><label>Name <input name=n value='Mara Lind'></label><br><label>Town <input value=Bergen></label><p>"
        "<input type=checkbox checked> Vegan <input type=radio> Meat</p>Size <select><option>S<option selected>L</select>"
        "<input type=hidden value=x7><input type=password value=secret><textarea>No nuts.</textarea></form>"
    )
    assert text_of(page) == "Name Mara Lind\nTown Bergen\n\n[x] Vegan [ ] Meat\n\nSize L\n\nNo nuts."
    tasks = "<ul><li><input type=checkbox checked disabled> Book<li><label><input type=checkbox> Pay</label></ul>"
    assert text_of(tasks + "<p><input type=checkbox> menu") == "- [x] Book\n- [ ] Pay\n\nmenu"


def test_xhtml_elements_close_themselves() -> None:
    head = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="a.js"/></head>'
    body = "<body><h1>Roses</h1><a id='x'/><p>Cut in March.<br/>Not later.</p></body></html>"
    for page in ('<?xml version="1.0"?>' + head + body, "<!DOCTYPE html>\n" + head + body):
        assert text_of(page) == "# Roses\n\nCut in March.\nNot later."
    chapter = "<title/><p>Cut.</p>"
    assert html_text(chapter, xhtml=True).text == "Cut.\n"
    assert html_text("<title>A</title><p>a<textarea/>b").text == "a\n\nb\n"  # HTML: the text area begins


def test_nested_parts_are_removed_or_read_once() -> None:
    assert text_of("<div hidden><div role=search><p hidden>a</div></div><p>b") == "b"
    assert text_of("<article>long text here<article>b</article></article><article>c</article>") == "long text here\n\nb"


CYRILLIC = "Стоимость парковки 45 евро."


def test_the_declared_charset_is_found_after_comments() -> None:
    head = f"<html><head><!-- <meta charset=koi8-r> {'x' * 4000} -->"
    for declaration in (
        "<meta charset='windows-1251'>",
        '<META http-equiv=x content="text/html; charset=windows-1251">',
    ):
        page = f"{head}{declaration}</head><body><p>{CYRILLIC}"
        assert from_html(page.encode("cp1251")).text == CYRILLIC + "\n"
    xml = f"<?xml version='1.0' encoding='windows-1251'?><html><p>{CYRILLIC}</p></html>"
    assert from_html(xml.encode("cp1251")).text == CYRILLIC + "\n"


def test_charsets_are_those_of_browsers() -> None:
    for charset, codec, word in (
        ("iso-8859-1", "cp1252", "45 €"), ("gb2312", "gb18030", "镕基"), ("shift_jis", "cp932", "①"), ("ks_c_5601-1987", "cp949", "서울"),
        ("iso-2022-jp", "iso2022_jp", "東京"), ("utf-16", "utf-8", "Grüße"), ("x-unknown", "utf-8", "Grüße"),
    ):  # fmt: skip
        found = from_html(f"<meta charset={charset}><p>{word}".encode(codec))
        assert (found.text, found.omissions) == (word + "\n", ())


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-8"])
def test_pages_are_decoded_by_their_byte_order_mark(codec: str) -> None:
    page = "<p>Größe</p>"
    assert from_html(codecs.encode("\ufeff" + page, codec)).text == "Größe\n"
    if codec.startswith("utf-16"):
        assert from_html(page.encode(codec)).text == "Größe\n"


def test_an_undeclared_encoding_is_assumed_only_where_it_is_plausible() -> None:
    found = from_html("<p>Die Straße nach Grünstadt ist gesperrt: à gauche, s'il vous plaît.".encode("cp1252"))
    assert "Straße nach Grünstadt" in found.text
    assert found.omissions == ("its encoding is not declared; read as windows-1252",)
    for data in (
        CYRILLIC.encode("cp1251"),
        "東京の天気".encode("cp932"),
        "środę z\u0142oty".encode("cp1250"),
        b"\0\xff\xfe",
    ):
        with pytest.raises(NotConverted, match="iconv") as error:
            from_html(b"<html><body><p>" + data)
        assert error.value.group == "not UTF-8"


def test_a_wrong_declaration_is_said() -> None:
    found = from_html("<meta charset=utf-8><p>Grüße aus Köln".encode("cp1252"))
    assert "Grüße aus Köln" in found.text
    assert found.omissions == ("its encoding is not utf-8, which it declares; read as windows-1252",)
    found = from_html("<meta charset=utf-8><p>Grüße aus Köln, ééé".encode() + b"\xff")
    assert "Grüße aus Köln" in found.text
    assert found.omissions == ("1 character is invalid in its charset, utf-8",)
