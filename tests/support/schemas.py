"""Random bounded JSON schemas, and a checker of values for the keywords that they use."""

from __future__ import annotations

import json
import random
import re
from typing import Any

_TYPES: dict[str, Any] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema with finitely many values that llguidance knows all keywords of."""
    leaves = [_choice, _string, _pattern, _integer, lambda _: {"type": rng.choice(["boolean", "null"])}]
    inner = [lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1), lambda r: _either(r, depth - 1)]
    return rng.choice(leaves if depth == 0 else leaves[:2] + inner)(rng)


def random_object(rng: random.Random) -> dict[str, Any]:
    """A schema as a tool's parameters have one."""
    return _object(rng, 2)


def _choice(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "blå", 7, None, True, [1, "x"], {"k": 0}, 'a"b\\'], rng.randint(1, 4))}


def _string(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^\\d{2}:\\d{2}$"])}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth), random_schema(rng, 0)]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "name", "日本", "x y", "city", 'q"', "unit"], rng.randint(0, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value follows a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(follows(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return json.dumps(value, sort_keys=True) in [json.dumps(one, sort_keys=True) for one in schema["enum"]]
    return _TYPES[schema["type"]](value) and _within(value, schema)


def _within(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, dict):
        known, needed = schema["properties"], schema["required"]
        return set(needed) <= value.keys() <= known.keys() and all(follows(value[k], known[k]) for k in value)
    if isinstance(value, list):
        sizes = schema["minItems"] <= len(value) <= schema["maxItems"]
        return sizes and all(follows(one, schema["items"]) for one in value)
    if isinstance(value, str):
        length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return length and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, int) and not isinstance(value, bool):
        return schema["minimum"] <= value <= schema["maximum"]
    return True
