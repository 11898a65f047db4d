"""Parse YAML text into plain data, with the line of every entry."""

from __future__ import annotations

import contextlib
from typing import Any

import yaml
from yaml.composer import Composer

from mcr_plus.config.document import MAX_DEPTH, Document, Keys, path_text
from mcr_plus.errors import ConfigError, short


def parse_mapping(
    text: str, document: Document, lines: dict[Keys, int], *, versioned: bool = True
) -> dict[str, Any]:
    """Parse the text of `document` and store the line of every entry in `lines`; see `parse_document`."""
    name = document.name
    try:
        node = _root(text)
    except _Refused as error:
        raise ConfigError(f"{name}:{error.line}: document: {error.what}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _yaml_error(name, mark.line + 1 if mark else 1, what) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise _yaml_error(name, line, f"character {error.character!r} is not allowed") from None
    except ValueError as error:  # an escaped character beyond the last of Unicode
        raise _yaml_error(name, 1, str(error)) from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:1: document: expected a mapping at the root, got {_node_kind(node)}")
    if versioned and not any(getattr(key, "value", None) == "version" for key, _ in node.value):
        raise ConfigError(f"{name}:1: version: missing; expected version: 1")
    return _mapping(node, (), document, lines)


def _yaml_error(name: str, line: int, what: str) -> ConfigError:
    # The most frequent cause is an unquoted comparison, such as `bytes: >=1MiB`.
    hint = "; put a string that begins with > in quotes" if "chomping" in what else ""
    return ConfigError(f"{name}:{line}: document: not valid YAML: {what}{hint}")


def _node_kind(node: yaml.Node | None) -> str:
    if node is None:
        return "an empty document"
    if isinstance(node, yaml.ScalarNode):
        return "a string"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


class _Refused(yaml.YAMLError):
    """Valid YAML with features beyond plain data."""

    def __init__(self, event: yaml.Event, what: str) -> None:
        self.line = event.start_mark.line + 1 if event.start_mark else 1
        self.what = what


class _PlainNodes(Composer):
    """Composes nodes; refuses features by which a short file could become large, hidden or executable."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[attr-defined]
        self._refuse(event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(event, "aliases are refused; put a string that begins with * in quotes")
        if getattr(event, "anchor", None) is not None:
            raise _Refused(event, "anchors are refused; put a string that begins with & in quotes")
        if (tag := getattr(event, "tag", None)) is not None:
            raise _Refused(event, f"tag {tag!r} is refused; expected plain data")
        if self.depth == MAX_DEPTH:
            raise _Refused(event, f"nested more than {MAX_DEPTH} levels deep")


class _Loader(_PlainNodes, yaml.SafeLoader):
    """Uses PyYAML's own parser, because our errors quote its messages."""


_cyaml: Any = getattr(yaml, "cyaml", None)  # missing if PyYAML was built without libyaml


def _fast_loader() -> Any:
    """Return a loader like `_Loader` with libyaml's parser, several times as fast on large tables."""

    class FastLoader(_PlainNodes, _cyaml.CParser, yaml.resolver.Resolver):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            _cyaml.CParser.__init__(self, text)
            Composer.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return FastLoader


_FastLoader: Any = _Loader if _cyaml is None else _fast_loader()


def _root(text: str) -> Any:
    if "\t" not in text and "?" not in text:  # libyaml accepts more uses of these than PyYAML
        with contextlib.suppress(yaml.YAMLError):  # parsed again below to get PyYAML's message
            return _FastLoader(text).get_single_node()
    return _Loader(text).get_single_node()


def _plain(node: yaml.Node, keys: Keys, document: Document, lines: dict[Keys, int]) -> Any:
    """Convert a node to plain data and store the line of every entry in `lines`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, keys, document, lines)
    if isinstance(node, yaml.SequenceNode):
        lines.update({(*keys, i): item.start_mark.line + 1 for i, item in enumerate(node.value)})
        return [_plain(item, (*keys, i), document, lines) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    try:
        return _scalar(node)
    except ValueError as error:
        raise document.error(keys, f"{error}") from None


def _mapping(
    node: yaml.MappingNode, keys: Keys, document: Document, lines: dict[Keys, int]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if _scalar_type(key_node) != "str":
            got = short(key_node.value) if isinstance(key_node, yaml.ScalarNode) else _node_kind(key_node)
            raise ConfigError(f"{document.name}:{line}: {path_text(keys)}: expected a name as key, got {got}")
        key = key_node.value
        here = (*keys, key)
        if key in data:
            first = lines[here]
            lines[here] = line
            raise document.error(here, f"written twice, first at line {first}; expected every key once")
        lines[here] = line
        data[key] = _plain(value_node, here, document, lines)
    return data


def _scalar_type(node: yaml.Node) -> str:
    """Return "str", "null", "bool", "int" or "float" for a scalar; dates and base-60 numbers are "str"."""
    name = node.tag.removeprefix("tag:yaml.org,2002:")
    if name not in ("null", "bool", "int", "float"):
        return "str" if isinstance(node, yaml.ScalarNode) else name
    return "str" if ":" in node.value else name


_SCALARS = yaml.constructor.SafeConstructor()
_MOST_DIGITS = 100


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of a scalar in YAML 1.1; raise ValueError for a number too long or malformed."""
    text: str = node.value
    match _scalar_type(node):
        case "null":
            return None
        case "bool":
            return text.lower() in ("yes", "true", "on")
        case "int":
            if len(text) > _MOST_DIGITS:  # Python writes no long integers, and no float holds them
                raise ValueError(f"a number of {len(text):,} digits; expected at most {_MOST_DIGITS}")
            return _SCALARS.construct_yaml_int(node)
        case "float":
            return _SCALARS.construct_yaml_float(node)
        case _:
            if not text.isascii():
                text.encode()  # raises ValueError for half of a surrogate pair, which nothing could print
            return text
