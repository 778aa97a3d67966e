"""The base class of a recipe's sections and the types of values that several sections use."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST = 10**10  # of any count: what exceeds it is a slip of the keyboard, and would only fail later
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
MISFIT = "misfit"


class Section(BaseModel):
    """A group of recipe keys: frozen, and without keys that are not in the schema.

    The docstring under a field is its description in the reference and in error messages. Its first sentence says what
    the value is, with its unit, and stands alone.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def misfit(message: str, *keys: str) -> PydanticCustomError:
    """The error for values that are valid one by one but contradict each other.

    `keys` are the dotted keys involved; the message is located at the first of them that the user has set.
    """
    return PydanticCustomError(MISFIT, "{message}", {"message": message, "keys": keys})
