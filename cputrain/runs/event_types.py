"""The fields of each event that its readers rely on. A line without them is damaged."""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from pydantic_core import from_json
from typing_extensions import NotRequired
from typing_extensions import TypedDict as Fields

MORE = ConfigDict(extra="allow", strict=True)  # fields of a later version are kept
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Maybe = Number | None
Time = Annotated[float, Field(strict=True, ge=0, lt=250_000_000_000)]  # Unix seconds, before the year 9892


@with_config(MORE)
class _Event(Fields):
    event: str
    time: Time
    monotonic_s: NotRequired[Time]


@with_config(MORE)
class _Binding(Fields):
    rank: Count
    host: str
    planned_pus: list[Count]
    pus: list[Count]
    memory_policy: str
    thread_pus: NotRequired[list[list[Count]]]


@with_config(MORE)
class _Start(_Event):
    bindings: list[_Binding]
    data: NotRequired[str]
    workers: NotRequired[Count]
    global_batch: NotRequired[Count]
    last_step: NotRequired[Count]
    steps_per_epoch: NotRequired[Count]
    train_images: NotRequired[Count]
    classes: NotRequired[Count]


@with_config(MORE)
class _Step(_Event):
    step: Count
    epoch: Number
    loss: Maybe
    rate: Number
    images_per_s: Number
    data_wait_s: NotRequired[Number]
    comm_wait_s: NotRequired[Number]


@with_config(MORE)
class _Ranks(_Event):
    step: Count
    steps: Count
    seconds: list[Number]
    data_wait_s: list[Number]
    comm_wait_s: list[Number]


def _one_value_for_each_rank(record: _Ranks) -> _Ranks:
    if not len(record["seconds"]) == len(record["data_wait_s"]) == len(record["comm_wait_s"]):
        raise ValueError("lists of different lengths")
    return record


@with_config(MORE)
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


@with_config(MORE)
class _Layer(Fields):
    layer: str
    weights: Maybe
    gradients: Maybe
    ratio: Maybe
    trust: Maybe


@with_config(MORE)
class _Ratios(_Event):
    step: Count
    rate: Number
    layers: list[_Layer]


@with_config(MORE)
class _Warning(_Event):
    what: str
    step: NotRequired[Count]
    images: NotRequired[list[str]]


@with_config(MORE)
class _Checkpoint(_Event):
    step: Count


@with_config(MORE)
class _End(_Event):
    status: str
    steps: Count
    images: Count
    top1: Maybe
    top5: Maybe
    val_loss: NotRequired[Maybe]
    test_top1: NotRequired[Maybe]
    test_top5: NotRequired[Maybe]
    time_to_train_s: Number
    wall_time_s: NotRequired[Number]
    trained_until: NotRequired[Time]
    trained_until_monotonic_s: NotRequired[Time]


TYPES: dict[str, Any] = {
    "start": _Start,
    "step": _Step,
    "ranks": Annotated[_Ranks, AfterValidator(_one_value_for_each_rank)],
    "epoch": _Epoch,
    "ratios": _Ratios,
    "warning": _Warning,
    "checkpoint": _Checkpoint,
    "end": _End,
}
OF_ANY_NAME = TypeAdapter(_Event).validator
VALIDATORS = {name: TypeAdapter(fields).validator for name, fields in TYPES.items()}
STEP, READ_STEP = b'{"event": "step",', VALIDATORS["step"].validate_json


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, None for a line that is none; an event of another name needs a time.

    Logs have a million steps: their lines are parsed and checked at once.
    """
    try:
        if line.startswith(STEP):
            step: dict[str, Any] = READ_STEP(line)
            return step if step["event"] == "step" else None  # a line may name two
        value = from_json(line)
        name = value.get("event") if isinstance(value, dict) else None
    except ValueError:  # a ValidationError is one
        return None
    validator = VALIDATORS.get(name, OF_ANY_NAME) if isinstance(name, str) else OF_ANY_NAME
    return value if validator.isinstance_python(value) else None
