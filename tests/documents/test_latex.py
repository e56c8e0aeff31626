"""LaTeX and BibTeX: words as people search for them, headings, and no comments."""

from __future__ import annotations

import pytest
from cacheblend_documents.latex import from_bibliography, from_latex

from cacheblend_cli.corpus.cutting import Locating


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"J\"urgen M\"{u}ller, Lef{\`e}vre, Caf\'{e}", "Jürgen Müller, Lefèvre, Café"),
        (r"na\"{\i}ve, \'\i, \c{c}a, \c ca, {\v s}, Erd\H{o}s, \~n, \k{a}", "naïve, í, ça, ça, š, Erdős, ñ, ą"),
        (r"Stra{\ss}e, Stra\ss e, \O re, \AA{}s, \L\'od\'z", "Straße, Straße, Øre, Ås, Łódź"),
        (r"12 \textdegree C, 4\,mm, $12.4\pm0.3$~t/ha", "12 °C, 4 mm, $12.4\\pm0.3$ t/ha"),
        (r"100\% of \#4, a\_b, R\&D --- % old: 11.9", "100% of #4, a_b, R&D —"),
        (r"A \& B & 12 \\% the end of a row", r"A \& B & 12 \\"),
        (r"\url{http://a.example/~joe%20a} % gone", r"\url{http://a.example/~joe%20a}"),
        (r"\emph{a \textbf{nested} {B}rassica}", "a nested Brassica"),
        (r"$\frac{a}{b}$, $x^{10}$, \cite{key}", r"$\frac{a}{b}$, $x^{10}$, \cite{key}"),
        (r"S\\\o k, Nord\\ S\"ud", r"S\\\o k, Nord\\ Süd"),
    ],
)
def test_accents_symbols_and_comments(source: str, text: str) -> None:
    assert from_latex(source.encode()).text == text


def test_sections_are_headings_and_lines_stay() -> None:
    found = from_latex(
        b"\\title{Growth of \\emph{Brassica}}\n% a comment\n\\section*{The $x^{2}$ law} \\label{sec:x}\nSeeds.\n"
        b'\\subsection[short]{In detail}\n\\begin{verbatim}\nx % y \\"u\n\\end{verbatim}\nRoots. % end\n'
    )
    assert found.text == (
        "# Growth of Brassica\n\n## The $x^{2}$ law\nSeeds.\n### In detail\n"
        '\\begin{verbatim}\nx % y \\"u\n\\end{verbatim}\nRoots.\n'
    )
    start = found.text.index("Roots")
    place = Locating(found).find(start, start + 5)
    assert (place.text, place.headings) == ("line 9", ("Growth of Brassica", "The $x^{2}$ law", "In detail"))


def test_the_declared_encoding_is_used() -> None:
    source = "\\usepackage[latin1]{inputenc}\nKøbenhavn\n"
    assert from_latex(source.encode("latin-1")).text == source
    assert from_latex(source.encode()).text == source


def test_a_bibliography_has_letters_and_keeps_its_addresses() -> None:
    source = b'@article{m21,\n author = {M{\\"u}ller, J. and Lef{\\`e}vre, A.},\n title = {The {DNA} of {B}rassica},\n url = {a%20b}}\n'
    assert from_bibliography(source).text == (
        "@article{m21,\n author = {Müller, J. and Lefèvre, A.},\n title = {The DNA of Brassica},\n url = {a%20b}}\n"
    )
