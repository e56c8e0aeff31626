"""A model's chat template: jinja, compiled and rendered as in transformers. Only `template_process` imports this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cacheblend_cli.errors import TemplateFailed, UsageError

GIVEN = {
    "messages", "add_generation_prompt", "tools", "documents", "strftime_now", "raise_exception", "bos_token", "eos_token",
    "unk_token", "pad_token",
}  # fmt: skip
"""Variables of a chat template that users may not set."""


class ChatTemplate:
    """Chat template compiled as transformers compiles it: sandboxed, trimmed blocks, loop controls, the generation tag,
    raise_exception, and a tojson that does not escape text. Raises TemplateFailed for a source that is not a template.
    """

    def __init__(self, source: str) -> None:
        self._source, extensions = source, [loopcontrols, GenerationTag]
        self._environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        del self._environment.globals["lipsum"]  # random text of any length
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise TemplateFailed(str(error)) from error
        except RecursionError as error:
            raise TemplateFailed("it is nested too deeply") from error
        except MemoryError:
            raise
        except Exception as error:  # jinja and Python's compiler can raise anything
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error

    def render(self, given: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
        """Render the template. given: variables passed to every template. variables: set by the user for this one."""
        if variables:
            known = self._variables()
            for name in variables.keys() - known:
                raise UsageError(
                    f"the chat template has no variable {name!r}",
                    f"it has: {', '.join(sorted(known)) or 'none to set'}",
                )
        try:
            return self._template.render({"enable_thinking": False, "thinking": False, **given, **variables})
        except UndefinedError as error:
            missing = ", ".join(sorted(self._variables() - variables.keys()))
            raise TemplateFailed(str(error), f"set it with --template-var NAME=VALUE; it knows: {missing}") from error
        except TemplateError as error:
            raise TemplateFailed(str(error)) from error
        except MemoryError:
            raise
        except Exception as error:  # templates can raise anything
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error

    def _variables(self) -> set[str]:
        """Return the variables that a user may set."""
        found = meta.find_undeclared_variables(self._environment.parse(self._source))
        return found - GIVEN - self._environment.globals.keys()


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; rendered as its content.
    Variables set inside are not visible outside, as in transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
