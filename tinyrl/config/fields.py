"""Types of settings, and what every section of them has in common.

Types are strict: 1 is not true, "3" is not 3 and true is not a number, so a wrong type is never taken for something
else.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 1_000_000  # of a coefficient, clip, cap or penalty: more is a slip, and overflows in float32 sooner or later

Positive = Annotated[int, Field(ge=1)]
NumPrompts = Annotated[int, Field(ge=1, le=1_000_000)]  # more would be minutes of counting, and no memory
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[float, Field(ge=1, le=LARGEST)]
AboveOne = Annotated[float, Field(gt=1, le=LARGEST)]
Weight = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of fields; a field it does not know is an error, and so are NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )
