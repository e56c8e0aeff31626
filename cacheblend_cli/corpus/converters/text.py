"""Files that are text already: prose and source code. Their lines are the file's."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.corpus.converters.converter import decoded
from cacheblend_cli.corpus.layout import Converted, Kind, Layout


@dataclass(frozen=True)
class TextConverter:
    """kind: what its headings or definitions look like."""

    suffixes: tuple[str, ...]
    kind: Kind = "text"

    def convert(self, data: bytes) -> Converted:
        return Converted(decoded(data), Layout(self.kind))


MARKDOWN = TextConverter((".md", ".markdown", ".mdx", ".qmd", ".rmd"), "markdown")
RST = TextConverter((".rst",), "rst")
PLAIN = TextConverter((".txt", ".text", ".adoc", ".asciidoc", ".org", ".log"))
CODE = TextConverter(
    tuple(
        ".py .pyi .pyx .js .jsx .mjs .cjs .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .go .rs .c .h .cc .cpp .cxx .hh .hpp .hxx "
        ".cu .cuh .m .mm .cs .fs .vb .swift .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hrl .hs .ml .mli .clj .cljs .lisp .el .scm "
        ".nim .zig .d .pas .f90 .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .thrift .tf .nix .cmake .mk .gradle .css "
        ".scss .less .yaml .yml .toml .ini .cfg .conf".split()
    ),
    "code",
)
NAMES = {
    "readme": PLAIN, "license": PLAIN, "licence": PLAIN, "copying": PLAIN, "notice": PLAIN, "changelog": PLAIN, "authors": PLAIN,
    "contributing": PLAIN, "makefile": CODE, "dockerfile": CODE, "rakefile": CODE, "gemfile": CODE, "justfile": CODE,
}  # fmt: skip
"""Names without a suffix, in lower case."""
