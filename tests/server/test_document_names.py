"""Files of one name are told apart by folders below the folder that was precomputed."""

from __future__ import annotations

import pytest

from cacheblend_cli.server.document_names import distinct_paths


@pytest.mark.parametrize(
    ("names", "roots", "expected"),
    [
        (["/h/docs/a.md", "/h/docs/b.md"], {"/h/docs"}, []),
        (["/h/docs/x/a.md", "/h/docs/y/a.md"], {"/h/docs"}, ["x/a.md", "y/a.md"]),
        (["/h/docs/x/1/a.md", "/h/docs/y/1/a.md"], {"/h/docs"}, ["x/1/a.md", "y/1/a.md"]),
        (["/h/docs/a.md", "/h/docs/x/a.md"], {"/h/docs"}, ["docs/a.md", "x/a.md"]),
        (["/h/x/a.md", "/h/y/a.md"], {"/h/x", "/h/y"}, ["x/a.md", "y/a.md"]),
        (["/h/x/a.md", "/h/y/a.md"], {"/h/x/a.md", "/h/y/a.md"}, ["x/a.md", "y/a.md"]),
        (["/h/x/1/a.md", "/h/y/1/a.md"], {"/h/x/1", "/h/y/1"}, ["1/a.md", "1/a.md"]),  # x and y are private
        (["/h/x/a.md", "/h/y/a.md"], set(), ["a.md", "a.md"]),
        (["(put)//a.md", "(put)/t/a.md"], {"/h"}, []),
        (["/h//-", "/g//-"], {"/h//-", "/g//-"}, []),  # stdin
    ],
)
def test_as_much_of_a_path_as_tells_files_apart(names: list[str], roots: set[str], expected: list[str]) -> None:
    assert list(distinct_paths(names, roots).values()) == expected
