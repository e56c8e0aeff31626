"""Files of one name have a path below the folder that was precomputed."""

from __future__ import annotations

import pytest

from cacheblend_cli.server.document_names import distinct_paths


@pytest.mark.parametrize(
    ("names", "roots", "expected"),
    [
        (["/h/docs/a.md", "/h/docs/b.md"], {"/h/docs"}, []),
        (["/h/docs/x/a.md", "/h/docs/y/a.md"], {"/h/docs"}, ["docs/x/a.md", "docs/y/a.md"]),
        (["/h/docs/x/1/a.md", "/h/docs/y/1/a.md"], {"/h/docs"}, ["docs/x/1/a.md", "docs/y/1/a.md"]),
        (["/h/docs/a.md", "/h/docs/x/a.md"], {"/h/docs"}, ["docs/a.md", "docs/x/a.md"]),
        (["/h/x/a.md", "/h/y/a.md"], {"/h/x", "/h/y"}, ["x/a.md", "y/a.md"]),
        (["/h/x/a.md", "/h/y/a.md"], {"/h/x/a.md", "/h/y/a.md"}, ["x/a.md", "y/a.md"]),
        (["/h/x/1/a.md", "/h/y/1/a.md"], {"/h/x/1", "/h/y/1"}, ["1/a.md", "1/a.md"]),  # x and y are private
        (["/h/x/a.md", "/h/y/a.md"], set(), ["a.md", "a.md"]),
        (["(put)//a.md", "(put)/t/a.md"], {"/h"}, []),
        (["/h//-", "/g//-"], {"/h//-", "/g//-"}, []),  # stdin
    ],
)
def test_files_of_one_name_have_a_path(names: list[str], roots: set[str], expected: list[str]) -> None:
    assert list(distinct_paths(names, roots).values()) == expected
