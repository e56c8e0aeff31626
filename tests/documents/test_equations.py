"""Equations of Office files as text."""

from __future__ import annotations

import pytest
from cacheblend_documents.word.docx import from_docx
from word_files import paragraph, run, word


def r(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


def e(*parts: str, name: str = "e") -> str:
    return "".join(f"<m:{name}>{r(part) if '<' not in part else part}</m:{name}>" for part in parts)


def value(properties: str, name: str, content: str) -> str:
    return f'<m:{properties}><m:{name} m:val="{content}"/></m:{properties}>'


SQUARE = f"<m:sSup>{e('x')}{e('2', name='sup')}</m:sSup>"
MATRIX = f"<m:m><m:mr>{e('a', 'b')}</m:mr><m:mr>{e('c', 'd')}</m:mr></m:m>"
LIMITS = e("i=1", name="sub") + e("n", name="sup")


@pytest.mark.parametrize(
    ("math", "text"),
    [
        (r("r=0.0475"), "r=0.0475"),
        (f"<m:f>{e('a+b', name='num')}{e('c', name='den')}</m:f>", "(a+b)/c"),
        (f"<m:f>{value('fPr', 'type', 'noBar')}{e('n', name='num')}{e('k', name='den')}</m:f>", "n choose k"),
        (SQUARE, "x^2"),
        (f"<m:sSup>{e(SQUARE)}{e('n+1', name='sup')}</m:sSup>", "(x^2)^(n+1)"),
        (f"<m:sSubSup>{e('a')}{LIMITS}</m:sSubSup>", "a_(i=1)^n"),
        (f"<m:nary>{value('naryPr', 'chr', '∑')}{LIMITS}{e(SQUARE)}</m:nary>", "∑_(i=1)^n x^2"),
        (f"<m:nary><m:sub/><m:sup/>{e('f')}</m:nary>", "∫ f"),
        (f"<m:rad><m:deg/>{e('x')}</m:rad>", "sqrt(x)"),
        (f"<m:rad>{e('3', name='deg')}{e('x')}</m:rad>", "sqrt[3](x)"),
        (f"<m:d>{e('a+b')}</m:d>", "(a+b)"),
        (f'<m:d><m:dPr><m:begChr m:val="{{"/><m:endChr m:val=""/></m:dPr>{e("a", "b")}</m:d>', "{a|b"),
        (MATRIX, "a, b; c, d"),
        (f"<m:d>{e(MATRIX)}</m:d>", "(a, b; c, d)"),
        (f"<m:eqArr>{e('a&amp;=1', 'b&amp;=2')}</m:eqArr>", "a=1; b=2"),
        (f"<m:func>{e('sin', name='fName')}{e('x')}</m:func>", "sin x"),
        (f"<m:limLow>{e('lim')}{e('x→0', name='lim')}</m:limLow>", "lim_(x→0)"),
        (f"<m:acc>{value('accPr', 'chr', chr(0x20D7))}{e('v')}</m:acc>", "v\u20d7"),
        (f"<m:bar>{value('barPr', 'pos', 'top')}{e('z')}</m:bar>", "z\u0305"),
        (r("\U0001d438") + "=" + r("m\U0001d450") + "<m:ctrlPr>" + r("no") + "</m:ctrlPr>", "Emc"),
    ],
)
def test_equations_are_text(math: str, text: str) -> None:
    found = from_docx(word(paragraph(run("so ") + f"<m:oMath>{math}</m:oMath>" + run(" holds")))).text
    assert found == f"so {text} holds\n"


def test_equations_of_a_paragraph_share_a_line() -> None:
    body = f"<m:oMathPara><m:oMathParaPr/><m:oMath>{r('a=1')}</m:oMath><m:oMath>{r('b=2')}</m:oMath></m:oMathPara>"
    assert from_docx(word(paragraph(body))).text == "a=1; b=2\n"
