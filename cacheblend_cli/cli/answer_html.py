"""`ask --html`: an answer and its sources as one page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from cacheblend_cli.cli.answer_output import by_rank
from cacheblend_cli.cli.output import visible
from cacheblend_cli.types import Answer, ChunkUse, TokenUse, unsupported_line

KINDS = {
    "exact": "from the store, exact",
    "reused": "from the store, computed in another context",
    "recomputed": "from the store, recomputed",
    "computed": "not in the store, computed",
}
# Okabe and Ito's palette, for colour-blind readers; underlines work without colours.
_STYLE = """
:root{color-scheme:light dark;--exact:#cfe6f5;--reused:#fbeec2;--recomputed:#f6c9a8;--computed:#e6cfe0;--line:#8884;--soft:#666}
@media(prefers-color-scheme:dark){:root{--exact:#0b4a6e;--reused:#5c4a05;--recomputed:#7a3500;--computed:#5c2f4d;--soft:#aaa}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:48rem;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.25rem;margin:.5rem 0}
h2{font-size:1rem;margin:1.5rem 0 .5rem}
.answer{font-size:1.1rem;white-space:pre-wrap;border-left:4px solid #0072b2;padding-left:.75rem}
.soft{color:var(--soft);font-size:.875rem}
details{border:1px solid var(--line);border-radius:.5rem;margin:.5rem 0;padding:.5rem .75rem}
summary{cursor:pointer}
.text{white-space:pre-wrap;font-size:.9rem;margin:.5rem 0 0}
mark{color:inherit;border-radius:.15rem;padding:.05rem 0}
.exact{background:var(--exact)}
.reused{background:var(--reused);text-decoration:underline dotted 1px}
.recomputed{background:var(--recomputed);text-decoration:underline solid 2px}
.computed{background:var(--computed);text-decoration:underline double 1px}
ul{list-style:none;padding:0;margin:.5rem 0}
li{margin:.15rem 0}
"""


def answer_page(question: str, answer: Answer, tokens: Sequence[Sequence[TokenUse]]) -> str:
    """Return the answer as an HTML page with sources by rank. tokens: one sequence per chunk of the answer."""
    legend = "".join(f'<li><mark class="{kind}">{kind}</mark> {text}</li>' for kind, text in KINDS.items())
    used = {chunk.start: found for chunk, found in zip(answer.chunks, tokens, strict=True)}
    sources = "".join(_source(chunk, used[chunk.start]) for chunk in by_rank(answer.chunks))
    facts = (
        f"{answer.model}, {answer.mode}, ratio {answer.ratio:.2g}; {answer.prompt_tokens} prompt tokens, {answer.cached_tokens} from "
        f"the store, {answer.exact_tokens} of them exact, {answer.recomputed_tokens} computed again"
    )
    said = filter(None, (unsupported_line(answer.claims), *answer.notes))
    notes = "".join(f'<p class="soft">{_text(note)}</p>' for note in said)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_text(question)}</title><style>{_STYLE}</style></head>
<body><h1>{_text(question)}</h1>
<div class="answer">{_text(answer.text.strip()) or "(no text)"}</div>
{notes}<h2>Sources</h2>
{sources or '<p class="soft">none</p>'}
<h2>Colours</h2><ul class="soft">{legend}</ul>
<p class="soft">{_text(facts)}</p>
</body></html>
"""


def _source(chunk: ChunkUse, tokens: Sequence[TokenUse]) -> str:
    where = ", ".join(filter(None, (chunk.place, " / ".join(chunk.headings))))
    where += f"; also in {', '.join(chunk.also_in)}" if chunk.also_in else ""
    runs = [
        f'<mark class="{kind}">{_text("".join(t.text for t in run))}</mark>'
        for kind, run in groupby(tokens, key=lambda token: token.kind)
    ]
    count = f"{chunk.tokens} tokens, {chunk.recomputed} computed" + (" again" if chunk.status != "computed" else "")
    return (
        f"<details open><summary>{_text(chunk.source)}"
        f' <span class="soft">{_text(where)}</span></summary>'
        f'<div class="soft">chunk {chunk.id[:12]}, {chunk.status}: {count}</div><p class="text">{"".join(runs)}</p></details>'
    )


def _text(text: str) -> str:
    """Escape markup, control characters and changes of text direction."""
    return escape(visible(text))
