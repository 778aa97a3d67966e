"""YAML of recipes and settings: YAML 1.2's values, in which the schema decides what is text, and bounded in all ways.

PyYAML reads YAML 1.1: 0123 is octal there, 2026-11-22 a date, 1:30 ninety, yes true.
"""

import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from cputrain.recipe.keys import Keys, annotation_of

MOST_BYTES = 100_000  # of a recipe; the largest shipped one has 4,000
MOST_DEPTH = 16
MOST_DIGITS = 18
# YAML 1.2.2, 10.3.2: the core schema.
NULL = re.compile(r"null|Null|NULL|~|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+")
BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = {".nan": "nan", ".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}


class _Loader(yaml.SafeLoader):
    """Composes nodes: no aliases, which can stand for gigabytes, no tags, no deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(f"*{event.anchor} is an alias: write out what it stands for", event)
        if event.tag is not None:
            raise _refusal(f"{event.tag} is a tag: leave it out", event)
        if self.depth >= MOST_DEPTH:
            raise _refusal(f"more than {MOST_DEPTH} levels of nesting", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}  # `value_of` decides


def _refusal(problem: str, at: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def compose(text: str) -> yaml.Node | None:
    """The nodes of a document; None for an empty one. Raises YAMLError for what is no YAML, or what no recipe needs."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def value_of(node: yaml.Node | None, keys: Keys = ()) -> Any:
    """The value of a node that stands at these keys: lists as tuples, plain text where the schema takes text only.

    Raises YAMLError for a key that is no text or occurs twice, and for a number that is too long.
    """
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key is a list or a section: write `key: value`", key)
            if key.value in values:
                raise _refusal(f"the key {key.value[:60]!r} occurs twice: remove one", key)
            values[key.value] = value_of(value, (*keys, key.value))
        return values
    if isinstance(node, yaml.SequenceNode):
        return tuple(value_of(item, (*keys, str(number))) for number, item in enumerate(node.value))
    if not isinstance(node, yaml.ScalarNode):
        return None
    return node.value if node.style else _plain(node, annotation_of(keys))


def setting_value(text: str, keys: Keys) -> Any:
    """The value of KEY=TEXT: the text itself, without quotes around it, where the schema takes text only, else YAML."""
    annotation = annotation_of(keys)
    quoted = text.strip()[:1] in ("'", '"')
    if takes_text(annotation) and not quoted:
        return None if NoneType in get_args(annotation) and NULL.fullmatch(text.strip()) else text
    try:
        return value_of(compose(text), keys)
    except yaml.YAMLError:
        return text  # no YAML, such as a path with a colon or a quote


def takes_text(annotation: Any) -> bool:
    """Whether a type has no other values than text, or null."""
    if annotation is str:
        return True
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return get_origin(annotation) not in (tuple, dict) and bool(parts) and all(map(takes_text, parts))


def _plain(node: yaml.ScalarNode, annotation: Any) -> Any:
    """An unquoted scalar as null, true or false, a number, or text."""
    text: str = node.value
    if takes_text(annotation):
        return None if NoneType in get_args(annotation) and NULL.fullmatch(text) else text
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if INT.fullmatch(text) or BASED.fullmatch(text):
        if len(text.lstrip("+-0")) > MOST_DIGITS:
            raise _refusal(f"{text[:30]}... has more than {MOST_DIGITS} digits", node)
        return int(text, 0) if BASED.fullmatch(text) else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return float(SPECIAL[text.lower()]) if text.lower() in SPECIAL else text
