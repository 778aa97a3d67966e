"""The base class of a recipe's sections and the types of values that several sections use."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MOST = 10**10  # of any count: what exceeds it is a slip of the keyboard, and would only fail later
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
MISFIT = "misfit"
# A terminal obeys control characters, no file name has NUL. The last surrogates stand for bytes that are not UTF-8, of
# which the names of files may consist.
NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
NO_TEXT = re.compile(rf"{NO_NAME.pattern}|[\udc80-\udcff]")
PATHS = ("path", "stage_dir", "weights", "output")


class Section(BaseModel):
    """A group of recipe keys: frozen, and without keys that are not in the schema.

    The docstring under a field is its description in the reference and in error messages. Its first sentence says what
    the value is, with its unit, and stands alone.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any, about: ValidationInfo) -> Any:
        unfit = NO_NAME if about.field_name in PATHS else NO_TEXT
        if isinstance(value, str) and (found := unfit.search(value)):
            raise ValueError(f"it has {found[0]!a}, a control character or no UTF-8: leave it out")
        return value


def misfit(message: str, *keys: str) -> PydanticCustomError:
    """The error for values that are valid one by one but contradict each other.

    `keys` are the dotted keys involved; the message is located at the first of them that the user has set.
    """
    return PydanticCustomError(MISFIT, "{message}", {"message": message, "keys": keys})
