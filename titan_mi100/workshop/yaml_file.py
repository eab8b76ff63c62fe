"""Reads a YAML file of another trainer as data: nothing in it is executed. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.patterns import unusable
from titan_mi100.wording import as_key, is_utf8, shortened

if TYPE_CHECKING:
    import yaml

_LARGEST, _MOST = 1 << 17, 10_000  # bytes of a file; values in it, each as often as aliases repeat it
_LONGEST = 400  # characters of a value that is no text
_TAG = "tag:yaml.org,2002:"
_PLAIN = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge")}


class YamlFile(NamedTuple):
    values: dict[str, Any]  # texts, numbers, booleans, None, dates, and lists and dicts of them
    lines: dict[str, int]  # of the keys at the top level


def read_yaml(path: str) -> YamlFile:
    """The content of a YAML file whose top level has keys.

    Raises:
        UserError: it cannot be read, has tags such as !!python/object, repeats a key, or is too large with its aliases.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(f"{path}: YAML needs PyYAML: pip install pyyaml (it is the extra yaml)") from None
    if problem := unusable(path, "*.yaml"):
        raise UserError(f"{path}: {problem}")
    with open(path, "rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise UserError(f"{path}: is larger than {_LARGEST:,} bytes, which no config is")
    try:
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        top = loader.get_single_node()
        if not isinstance(top, yaml.MappingNode):
            raise UserError(f"{path}:1: has no keys at its top level; expected lines such as learning_rate: 2e-5")
        for number, _ in enumerate(_checked(path, top, "", loader)):
            if number == _MOST:
                raise UserError(f"{path}: has more than {_MOST:,} values, with those that its aliases repeat")
        lines = {key.value: _line(key) for key, _ in top.value}
        return YamlFile(loader.construct_document(top), lines)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        mark, reason = getattr(error, "problem_mark", None), str(getattr(error, "problem", error))
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where}: cannot be read as YAML: {shortened(' '.join(reason.split()), 200)}") from None


def _line(node: "yaml.Node") -> int:
    return node.start_mark.line + 1


def _checked(path: str, node: "yaml.Node", where: str, loader: "yaml.SafeLoader | None") -> Iterator[None]:
    """Look at each value in a node, one by one; a value that an alias names is there again.

    Args:
        where: the keys that lead to it.
        loader: makes the values; None: it is a key, which stays a text.

    Raises:
        UserError: it is no plain value, or repeats a key.
    """
    if node.tag not in _PLAIN:
        why = f"the tag {as_key(node.tag.replace(_TAG, '!!'))} is not followed, only plain values are read"
        raise UserError(f"{path}:{_line(node)}: {where or 'the file'}: {why}; delete the tag, or the key")
    if isinstance(node.value, str) and not is_utf8(node.value):
        raise UserError(f"{path}:{_line(node)}: {where} is not UTF-8; write another text")
    if isinstance(node.value, str) and loader:
        try:
            is_long = len(repr(loader.construct_object(node))) > _LONGEST and node.tag != f"{_TAG}str"
        except Exception as error:  # PyYAML raises all kinds for a date without such a day, or a number without digits
            why = f"cannot be read as {as_key(node.tag.replace(_TAG, '!!'))}: {shortened(' '.join(str(error).split()))}"
            raise UserError(
                f"{path}:{_line(node)}: {where} = {shortened(node.value)} {why}; correct it, or quote it without a tag"
            ) from None
        if is_long:
            raise UserError(f"{path}:{_line(node)}: {where} is a number that no setting has; correct it")
    yield
    names = set[str]()
    for number, member in enumerate(node.value if isinstance(node.value, list) else ()):
        key, value_node = member if isinstance(member, tuple) else (None, member)
        name = f"{where}[{number}]"
        if key is not None:
            yield from _checked(path, key, f"a key of {where or 'the file'}", None)
            if not isinstance(key.value, str) or key.value in names:
                raise UserError(f"{path}:{_line(key)}: {as_key(str(key.value))} is given twice, or no text; delete it")
            names.add(key.value)
            key.tag = key.tag if key.tag == f"{_TAG}merge" else f"{_TAG}str"  # `on` is a name here, not true
            name = f"{where}.{as_key(key.value)}".lstrip(".")
        yield from _checked(path, value_node, name, loader)
