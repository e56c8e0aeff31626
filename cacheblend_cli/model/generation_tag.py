"""The `{% generation %}` tag of chat templates. In a module of its own: jinja2 is imported when a template is."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says, for training; here it is its content.

    What is set inside is not seen outside, as with transformers.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
