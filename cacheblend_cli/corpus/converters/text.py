"""Files that are already text: prose and source code. Lines of the text are lines of the file."""

from __future__ import annotations

from cacheblend_cli.corpus.converters.converter import decoded
from cacheblend_cli.corpus.layout import Converted, TextLayout

CODE_SUFFIXES = (
    ".py .pyi .pyx .js .jsx .mjs .cjs .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .go .rs .c .h .cc .cpp .cxx .hh .hpp .hxx "
    ".cu .cuh .m .mm .cs .fs .vb .swift .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hrl .hs .ml .mli .clj .cljs .lisp .el .scm "
    ".nim .zig .d .pas .f90 .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .thrift .tf .nix .cmake .mk .gradle .css "
    ".scss .less .yaml .yml .toml .ini .cfg .conf"
)


def from_plain(data: bytes) -> Converted:
    return Converted(decoded(data))


def from_markdown(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("markdown"))


def from_rst(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("rst"))


def from_code(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("code"))
