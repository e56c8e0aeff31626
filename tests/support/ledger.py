"""Record the counts of tests, so that `make torture` can commit them."""

from __future__ import annotations

import json
import os
from pathlib import Path


class Ledger:
    """Lines of JSON in the file that TORTURE_LEDGER names; nowhere when it is not set.

    A line is added after the assertions of a test held, so zeros in it are seen zeros.
    """

    def __init__(self) -> None:
        name = os.environ.get("TORTURE_LEDGER")
        self._path = Path(name) if name else None

    def add(self, what: str, **counts: int | float | str) -> None:
        if self._path is not None:
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]  # without its phase
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"what": what, "test": test, **counts}) + "\n")
