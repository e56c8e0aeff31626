"""cacheblend chunks: what lists chunks, what keeps the store in order, and what takes chunks out of it and in."""

from __future__ import annotations

from cacheblend_cli.cli import archive, chunks, upkeep

app = chunks.app
for command in (upkeep.stats, upkeep.verify, upkeep.prune, upkeep.compact):
    app.command(command.__name__)(command)
app.command("export")(archive.export)
app.command("import")(archive.import_)
