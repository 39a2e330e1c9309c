"""Which wire formats the models of a configuration have, for `fairlead config check`."""

from typing import Final

import msgspec

from fairlead.base.config import Config, ModelConfig
from fairlead.base.errors import LoadFailed
from fairlead.language.structured.probing import Source
from fairlead.language.text.answer_format import detected_format
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.hub import find_local

_SOURCES: Final[dict[Source, str]] = {
    "configuration": "from wireFormat",
    "response_template": "from its response_template",
    "chat template": "from its chat template",
    "default": "the default",
}
_OF_RECORDS = ("configured", "response_template")


class ModelFormat(msgspec.Struct, frozen=True):
    """How the answers of one model mark reasoning and tool calls.

    name: The name of the format; None: it has none, or is unknown.
    source: Where it is from; None: it has none, or is unknown.
    reasoning: It marks reasoning.
    tool_calls: It marks tool calls.
    tools_explained: A system message explains tools, which the chat template does not.
    template_calls: The format in which a template writes calls that ignores tools; "": it ignores none.
    rewritten: What is written in another way in messages and tools, because the template cannot take it.
    note: Why there is no name, or why the model's own record is not used.
    """

    name: str | None = None
    source: Source | None = None
    reasoning: bool = False
    tool_calls: bool = False
    tools_explained: bool = False
    template_calls: str = ""
    rewritten: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return a line for a person."""
        if self.name is None or self.source is None:
            return self.note
        parts = [f"{'a record' if self.name in _OF_RECORDS else self.name}, {_SOURCES[self.source]}"]
        parts += ["no reasoning"] * (not self.reasoning)
        parts += ["no tool calls"] * (not self.tool_calls)
        parts += ["tools are explained in a system message"] * self.tools_explained
        calls = f"its chat template writes calls as {self.template_calls}, but ignores tools"
        parts += [calls] * bool(self.template_calls)
        parts += [f"its response_template cannot be used: {self.note}"] * bool(self.note)
        return "; ".join(parts)


def formats_of(config: Config) -> dict[str, ModelFormat]:
    """Return the formats of the models that the built-in engine runs, by the models' names.

    Reads a few files of each model, but not its vocabulary. Nothing is downloaded.
    """
    return {model.name: _format_of(model) for model in config.models if isinstance(model, ModelConfig)}


def _format_of(model: ModelConfig) -> ModelFormat:
    folder = find_local(model.path)
    if folder is None:
        return ModelFormat(note="not known, because the model is not on this machine")
    try:
        template = ChatTemplate.load(folder)
        found = detected_format(folder, template, model.wire_format)
    except LoadFailed as error:
        return ModelFormat(note=f"not known: {error.message}")
    if template is None:
        return ModelFormat(note="none, because the model has no chat template")
    return ModelFormat(
        name=found.wire_format.name,
        source=found.source,
        reasoning=found.wire_format.reasoning is not None,
        tool_calls=found.wire_format.calls is not None,
        tools_explained=found.explains_tools,
        template_calls=found.shown,
        rewritten=tuple(template.limits.described()),
        note=found.fault,
    )
