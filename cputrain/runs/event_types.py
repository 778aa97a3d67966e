"""The fields of each event that its readers rely on. A line without them is damaged."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Maybe = Number | None


class _Event(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    event: str
    time: Number


class _Binding(BaseModel):
    rank: Count
    host: str
    planned_pus: list[Count]
    pus: list[Count]
    memory_policy: str
    thread_pus: list[list[Count]] = []


class _Start(_Event):
    bindings: list[_Binding]
    data: str = ""
    workers: Count = 0
    global_batch: Count = 0
    train_images: Count = 0
    classes: Count = 0


class _Step(_Event):
    step: Count
    epoch: Number
    loss: Maybe
    rate: Number
    images_per_s: Number


class _Epoch(_Event):
    step: Count
    epoch: Number
    train_loss: Maybe
    train_top1: Maybe
    val_loss: Maybe
    val_top1: Maybe
    val_top5: Maybe
    seconds: Number
    images_per_s: Number


class _Layer(BaseModel):
    layer: str
    weights: Maybe
    gradients: Maybe
    ratio: Maybe
    trust: Maybe


class _Ratios(_Event):
    step: Count
    rate: Number
    layers: list[_Layer]


class _Warning(_Event):
    what: str
    images: list[str] = []


class _Checkpoint(_Event):
    step: Count


class _End(_Event):
    status: str
    steps: Count
    images: Count
    top1: Maybe
    top5: Maybe
    val_loss: Maybe = None
    test_top1: Maybe = None
    test_top5: Maybe = None
    time_to_train_s: Number
    wall_time_s: Number = 0.0
    trained_until: Number = 0.0


TYPES: dict[str, type[_Event]] = {
    "start": _Start,
    "step": _Step,
    "epoch": _Epoch,
    "ratios": _Ratios,
    "warning": _Warning,
    "checkpoint": _Checkpoint,
    "end": _End,
}


def is_event(value: Any) -> bool:
    """Whether a line's JSON is an event with all that its readers rely on; an event of another name needs a time."""
    if not isinstance(value, dict):
        return False
    name = value.get("event")
    try:
        (TYPES.get(name, _Event) if isinstance(name, str) else _Event).model_validate(value)
    except ValidationError:
        return False
    return True
