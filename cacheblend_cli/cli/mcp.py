"""cacheblend mcp: search, ask and documents as tools of programs that speak the Model Context Protocol. Imports no
torch."""

from __future__ import annotations

import os

from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.errors import UsageError
from cacheblend_cli.extras import require
from cacheblend_cli.settings import Resolved
from cacheblend_cli.settings.fields import API_KEY_VARIABLE


@options.with_settings(*options.ENGINE)
def mcp(
    resolved: Resolved,
    url: str | None = Option(
        None, help=f"Use this server; {API_KEY_VARIABLE} is its API key.", show_default="the store's engine"
    ),
    idle_exit: float = Option(3600.0, min=0, help="Stop the engine this command started after this many idle seconds."),
) -> None:
    """Serve the Model Context Protocol on stdin and stdout: search, ask, add_document, list_documents, and documents'
    texts.

    It uses the running engine of the store, and starts one in the background at the first call if none runs.
    """
    flags = options.engine_flags(resolved)
    if url is not None and flags:
        raise UsageError(
            f"--url and {flags[0]} were given together", "give the setting to the server: cacheblend serve"
        )
    require("cacheblend mcp", "mcp", "mcp")
    from cacheblend_cli.server.mcp_stdio import serve_store, serve_url

    if url is not None:
        serve_url(url, os.environ.get(API_KEY_VARIABLE, ""))
    else:
        serve_store(resolved.settings, flags, idle_exit)
