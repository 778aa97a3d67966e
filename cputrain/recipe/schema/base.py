"""What all sections of a recipe are, and the kinds of values in them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
MISFIT = "misfit"


class Section(BaseModel):
    """A part of a recipe: frozen, and nothing in it that is not in the schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def misfit(message: str, *keys: str) -> PydanticCustomError:
    """The error for values that are each valid and do not go together.

    `keys` are the dotted keys that are involved: a message is located at the first of them that the user has set.
    """
    return PydanticCustomError(MISFIT, "{message}", {"message": message, "keys": keys})
