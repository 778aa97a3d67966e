"""The keys of the schema by their dotted paths, and the similar keys of a name that is unknown."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from affinity.wording import first_sentence
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import Section

Keys = tuple[str, ...]
"""The path of a key: ("batch", "local") is batch.local."""

# Names of keys in other trainers -> the keys here.
OTHER_NAMES = {
    "lr": ("schedule.peak_rate",),
    "learning_rate": ("schedule.peak_rate",),
    "base_lr": ("schedule.peak_rate",),
    "batch_size": ("batch.local", "batch.global"),
    "global_batch": ("batch.global",),
    "local_batch": ("batch.local",),
    "gradient_accumulation_steps": ("batch.accumulation",),
    "optimizer": ("optim.name",),
    "wd": ("optim.weight_decay",),
    "eps": ("optim.epsilon",),
    "trust_coeff": ("optim.trust_coefficient",),
    "gamma": ("schedule.milestone_factor",),
    "arch": ("model.name",),
    "network": ("model.name",),
    "dataset": ("data.path",),
    "data": ("data.path",),
    "data_dir": ("data.path",),
    "data_path": ("data.path",),
    "drop_last": ("data.last_batch",),
    "bucket_cap_mb": ("comm.bucket_mib",),
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "num_workers": ("plan.ppn", "plan.loader_cores"),
    "nproc_per_node": ("plan.ppn",),
    "gpus": ("plan.ppn",),
    "bs": ("batch.local", "batch.global"),
    "per_device_train_batch_size": ("batch.local",),
    "log_dir": ("output",),
    "output_dir": ("output",),
    "workers": ("plan.ppn", "plan.loader_cores"),
    "warmup": ("schedule.warmup_epochs",),
}


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field's type is, or that its list holds; None where it holds values."""
    inner = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def fields_of(keys: Keys) -> Keys:
    """The keys of the section at this path, ("0",) where it is a list of sections; none where it is a value."""
    annotation = annotation_of(keys)
    section = section_of(annotation)
    if section is None:
        return ()
    if get_origin(annotation) is tuple:
        return ("0",)
    return tuple(field.alias or name for name, field in section.model_fields.items())


def annotation_of(keys: Keys) -> Any:
    """The type at this path; Any where there is none."""
    if not keys:
        return Recipe
    field = field_at(keys)
    if field is not None:
        return field.annotation
    parent = annotation_of(keys[:-1])
    return get_args(parent)[0] if get_origin(parent) is tuple else Any  # tuple[Section, ...] is reached by an index


def field_at(keys: Keys) -> FieldInfo | None:
    """The schema's field at this path; None where there is none, or an item of a list."""
    if not keys:
        return None
    fields = getattr(annotation_of(keys[:-1]), "model_fields", {})
    return next((field for name, field in fields.items() if (field.alias or name) == keys[-1]), None)


def known_path(location: Iterable[int | str]) -> Keys:
    """The keys in the location of a pydantic error, without what pydantic adds below a value."""
    keys: Keys = ()
    for part in location:
        fields = fields_of(keys)
        if not fields:
            break
        keys += (str(part),)
        if part not in fields and not isinstance(part, int):
            break
    return keys


def all_keys(section: type[Section] = Recipe, above: Keys = ()) -> list[str]:
    """Every key of a recipe, dotted, without those of phases, which repeat other keys."""
    found: list[str] = []
    for name, field in section.model_fields.items():
        path = (*above, field.alias or name)
        inner = field.annotation
        found.append(".".join(path))
        if isinstance(inner, type) and issubclass(inner, Section):
            found += all_keys(inner, path)
    return found


def similar_keys(keys: Keys, value: Any) -> list[str]:
    """Up to three keys that an unknown key may stand for: keys of the same name in other sections, keys with that name
    in other trainers, or keys of similar spelling, first in the same section."""
    *above, last = keys
    every = all_keys()
    found = [key for key in every if key.rpartition(".")[2] == last]
    if not found and not isinstance(value, dict):
        found = list(OTHER_NAMES.get(last, ()))
    if not found:
        siblings = fields_of(tuple(above))
        found = [".".join((*above, near)) for near in get_close_matches(last, siblings, n=1, cutoff=0.5)]
    if not found:
        by_last = {key.rpartition(".")[2]: key for key in every}
        found = [by_last[near] for near in get_close_matches(last, by_last, n=1, cutoff=0.75)]
    return found[:3]


def describe_key(keys: Keys) -> str:
    """The first sentence of a key's description, without its period; "" where it has none."""
    field = field_at(keys)
    return first_sentence((field.description if field else None) or "").partition("; ")[0]
