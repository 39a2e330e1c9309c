"""Command-line options for settings: `config` has their types, ranges, defaults and help texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from cyclopts import Parameter, validators

from fairlead.base.config.documentation import documentation_of
from fairlead.base.config.spelling import settings_of

Options = TypeVar("Options")
Validator = Callable[[Any, Any], None]


class SettingOption(NamedTuple):
    """An option for a setting.

    name: the option's name.
    owner: the struct that has the setting.
    field: the setting's field there.
    env_var: an environment variable that may hold its value.
    validator: a check beside the setting's range.
    """

    name: str
    owner: type[msgspec.Struct]
    field: str
    env_var: str | None = None
    validator: Validator | None = None

    @property
    def default(self) -> Any:
        """The setting's default."""
        fields = {field.name: field for field in msgspec.structs.fields(self.owner)}
        return fields[self.field].default

    @property
    def annotation(self) -> Any:
        """The option's type, with its range. None means that the option is not given."""
        shape = next(setting.shape for setting in settings_of(self.owner) if setting.name == self.field)
        variable: dict[str, Any] = {"env_var": self.env_var}
        if shape.kind is bool:
            return Annotated[bool, Parameter(negative="", **variable)]
        checks: list[Validator] = [] if self.validator is None else [self.validator]
        if shape.kind is float:
            checks += [validators.Number(lt=float("inf")), no_nan]
        if shape.kind in (int, float):
            checks += [validators.Number(gt=meta.gt, gte=meta.ge, lte=meta.le) for meta in shape.metas]
        kind = Literal[shape.choices] if shape.choices else shape.kind
        return Annotated[kind | None, Parameter(validator=checks, **variable)]

    @property
    def help(self) -> str:
        """The setting's documentation, with its unit and its default."""
        text = documentation_of(self.owner)[self.field]
        if self.field.endswith("_s"):
            text += " In seconds."
        if self.default in (None, False) or "Default:" in text:
            return text
        default = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{text} Default: {default}."


def setting_options(options: Sequence[SettingOption]) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that makes a frozen dataclass, with a field and a help text for each option."""

    def decorate(kind: type[Options]) -> type[Options]:
        own = dict(kind.__annotations__)
        kind.__annotations__.clear()
        for option in options:
            kind.__annotations__[option.name] = option.annotation
            setattr(kind, option.name, False if option.default is False else None)
        kind.__annotations__.update(own)
        made = dataclass(frozen=True, kw_only=True)(kind)
        type.__setattr__(made, "__doc__", _Help(made.__doc__ or "", options))
        return made

    return decorate


class _Help:
    """A docstring with further parameters. It is made when it is read, because that takes a while."""

    def __init__(self, docstring: str, options: Sequence[SettingOption]) -> None:
        self._docstring = docstring.rstrip()
        self._options = options

    def __get__(self, _instance: object, _owner: object) -> str:
        parameters = (f"    {option.name}\n        {option.help}" for option in self._options)
        return "\n".join([self._docstring, *parameters, ""])


def no_nan(_type: object, value: float | None) -> None:
    """Reject NaN: every comparison with it is false, so the range validators accept it."""
    if value is not None and value != value:  # noqa: PLR0124 - only NaN differs from itself
        raise ValueError("Must be a number.")
