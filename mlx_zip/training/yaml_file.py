"""Reads YAML files; refuses a mapping that gives a name twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _UniqueNamesLoader(yaml.SafeLoader):
    """Builds plain values only, and refuses a mapping that gives one name twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Returns the node of the next mapping. Raises `yaml.YAMLError` if the mapping gives a name twice."""
        node = super().compose_mapping_node(anchor)
        given: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in given:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            given.add(str(key.value))
        return node


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file. Raises `OSError` if it cannot be read, `ValueError` if it is invalid."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), _UniqueNamesLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(_describe_yaml_error(error)) from error


def _describe_yaml_error(error: yaml.YAMLError | RecursionError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {' '.join(str(error.problem).split())}"
    return " ".join(str(error).split())
