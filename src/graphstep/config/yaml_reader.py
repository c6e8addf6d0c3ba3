"""PyYAML behind two functions with errors of our own: it is an extra, and is loaded only when a YAML file is read."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphstep.errors import ConfigError, Problem

if TYPE_CHECKING:
    from yaml.nodes import Node


def compose_yaml(text: str, source: str) -> list[Node]:
    """Return the documents of a YAML text as nodes with places. Nothing is constructed.

    Args:
        text: one or more documents.
        source: its name, for messages.

    Raises:
        ConfigError: PyYAML is missing, or the text is no YAML.
    """
    yaml = _pyyaml(source)
    try:
        return [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        what = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError(Problem("yaml-syntax", f"this is no YAML: {what}", where, "correct the file")) from error
    except RecursionError as error:
        raise ConfigError(Problem("yaml-syntax", "nested too deeply", source, "correct the file")) from error


def construct_yaml(node: Node, source: str) -> Any:
    """Return the plain value of a node: numbers, text, lists and the like, nothing else.

    Args:
        node: from :func:`compose_yaml`.
        source: name of the text, for messages.

    Raises:
        ConfigError: a tag that asks for something else.
    """
    yaml = _pyyaml(source)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        what = str(getattr(error, "problem", None) or error).splitlines()[0]
        where = f"{source}:{node.start_mark.line + 1}"
        raise ConfigError(Problem("yaml-value", f"this is no plain value: {what}", where, "correct it")) from error
    finally:
        loader.dispose()


def _pyyaml(source: str) -> ModuleType:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        fix = "pip install 'graphstep[yaml]'"
        raise ConfigError(Problem("yaml-missing", "YAML files need PyYAML", source, fix)) from error
