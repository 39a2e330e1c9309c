"""The forms that the clients request: any answer of them fits the model's context.

No text is free, and no object may have further properties.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Form(BaseModel):
    """An object without further properties."""

    model_config = ConfigDict(extra="forbid")


class City(Form):
    """A city and how large it is."""

    name: Literal["Oslo", "Bergen", "Tromsø"]
    size: Literal["small", "large"]
    coastal: bool


class Trip(Form):
    """A trip to some cities."""

    days: Annotated[int, Field(ge=1, le=30)]
    cities: Annotated[list[City], Field(min_length=1, max_length=2)]
    purpose: Literal["work", "rest"] | None


class GetWeather(Form):
    """Return the weather of a city."""

    city: Literal["Oslo", "Bergen"]
    unit: Literal["C", "F"]


QUESTION = "Plan a trip to Oslo."
