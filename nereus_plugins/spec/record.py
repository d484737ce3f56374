"""What every spec record shares: strict checks, and reading and writing as dict, JSON and YAML.

A record is a frozen dataclass that inherits `Record`. Reading is strict: an unknown key, a missing
key or a value of the wrong type raises `SpecError` naming where it stands and, for a key, the
nearest valid one. Mappings become `FrozenMap` and lists become tuples, so that a record is
immutable all the way down, hashable, and travels between processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

R = TypeVar("R", bound="Record")
K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


# What a file of settings may be at most; a trace of a million steps has a tenth of it.
MOST_FILE_BYTES = 1 << 28
# What repeats (`*name`) of a YAML file may add up to, in characters: a few lines of it can say
# more than memory holds.
MOST_REPEATED = 1 << 20
MOST_NUMBER_TEXT = 4000  # characters of a whole number
# Whole numbers above are not exact as a float; none of a setting is as large.
MOST_INTEGER = 1 << 53


class SpecError(ValueError):
    """A spec that breaks a rule. The message names the rule and the setting to change."""


class _Shown(reprlib.Repr):
    """`repr`, short however large or deep the value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 6
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out the longest.
        return repr(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # In its own order.
        if level <= 0:
            return "{...}" if x else "{}"
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in list(x.items())[: self.maxdict]
        ]
        return f"{{{', '.join([*parts, '...'] if len(x) > self.maxdict else parts)}}}"


MOST_SHOWN = 160


def shown(value: object) -> str:
    """A value that a user gave, as an error shows it: on one line, and never long."""
    text = _Shown().repr(dict(value) if isinstance(value, FrozenMap) else value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


class FrozenMap(Mapping[K, V_co]):
    """An immutable, hashable, picklable mapping that keeps insertion order."""

    __slots__ = ("_items",)
    _items: dict[K, V_co]

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = ()) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __getitem__(self, key: K) -> V_co:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("FrozenMap is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("FrozenMap is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (dict(self._items),))


def unknown_key(key: object, valid: Iterable[str], where: str) -> SpecError:
    """The error for `key` found in `where`, naming the nearest of the `valid` keys."""
    names = list(valid)
    near = difflib.get_close_matches(shown(key).strip("'"), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(names))}"
    return SpecError(f"{where}: unknown key {shown(key)}; {hint}")


def require(condition: bool, message: str) -> None:
    """Raise `SpecError(message)` unless `condition` holds."""
    if not condition:
        raise SpecError(message)


def divisors_text(value: int, most: int | None = None) -> str:
    """The divisors of `value`, up to `most`, in words: "1, 2 or 4"."""
    # More than these no layout takes, and to look for them would take for ever.
    found = [str(n) for n in range(1, min(value, most or value, 1 << 17) + 1) if value % n == 0]
    return " or ".join(part for part in (", ".join(found[:-1]), found[-1]) if part)


def require_int(
    owner: str, name: str, value: object, *, minimum: int = 1, maximum: int = MOST_INTEGER
) -> None:
    """`value` is an int (no bool) within the limits, else `SpecError` naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SpecError(
            f"{owner}.{name} must be an integer of at least {minimum}, got {shown(value)}"
        )
    if value > maximum:
        raise SpecError(
            f"{owner}.{name} must be an integer of at most {maximum}, got {shown(value)}"
        )


def require_choice(owner: str, name: str, value: object, choices: Iterable[str]) -> None:
    """`value` is one of `choices`, else `SpecError` naming the field and the choices."""
    names = tuple(choices)
    if value not in names:
        raise SpecError(f"{owner}.{name} must be one of {', '.join(names)}; got {shown(value)}")


def require_bool(owner: str, name: str, value: object) -> None:
    """`value` is true or false, else `SpecError` naming the field."""
    if not isinstance(value, bool):
        raise SpecError(f"{owner}.{name} must be true or false, got {shown(value)}")


def as_float(value: Any) -> float:
    """`value`, a number, as a float; infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def require_number(
    owner: str,
    name: str,
    value: object,
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> None:
    """`value` is a finite number (no bool) within the limits given, else `SpecError`."""
    limits = [
        text
        for limit, text in (
            (above, f"above {above}"),
            (minimum, f"at least {minimum}"),
            (maximum, f"at most {maximum}"),
        )
        if limit is not None
    ]
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok:
        number = as_float(value)
        ok = (
            number == number
            and abs(number) != float("inf")
            and (above is None or number > above)
            and (minimum is None or number >= minimum)
            and (maximum is None or number <= maximum)
        )
    if not ok:
        raise SpecError(
            f"{owner}.{name} must be a number{' ' if limits else ''}{' and '.join(limits)}, "
            f"got {shown(value)}"
        )


class Record:
    """Base of all spec records (frozen dataclasses): strict reading, plain writing."""

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any], *, where: str | None = None) -> R:
        """Build from a mapping of field names; `where` names the place in error messages."""
        where = where or cls.__name__
        if not isinstance(data, Mapping):
            raise SpecError(f"{where}: expected a mapping of settings, got {shown(data)}")
        fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
        for key in data:
            if key not in fields:
                raise unknown_key(key, fields, where)
        hints = typing.get_type_hints(cls)
        values = {
            key: _decode(hints[key], _number(key, value, where), f"{where}.{key}")
            for key, value in data.items()
        }
        for name, field in fields.items():
            no_default = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if name not in values and no_default:
                raise SpecError(f"{where}: required key {name!r} is missing")
        try:
            made = cls(**values)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") if where != cls.__name__ else error from None
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # A value of a type that its own checks do not expect.
            for key, value in values.items():
                _check_type(hints[key], value, f"{where}.{key}")
            raise SpecError(f"{where}: {error}") from None
        for key, value in values.items():
            _check_type(hints[key], value, f"{where}.{key}")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; fields at their default are left out."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            default = (
                field.default_factory()
                if field.default_factory is not dataclasses.MISSING
                else field.default
            )
            if field.init and value != default:
                out[field.name] = _encode(value)
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        return cls.from_dict(load_json(text, cls.__name__))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls: type[R], text: str) -> R:
        return cls.from_dict(load_yaml(text, cls.__name__))

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Read a .yaml, .yml or .json file. Raises: SpecError naming the file; OSError."""
        path = Path(path)
        text = read_text(path)
        try:
            return cls.from_json(text) if path.suffix == ".json" else cls.from_yaml(text)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of silently keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, (list, dict, set)):
                raise SpecError(f"line {line}: a key must be a text or a number, got {shown(key)}")
            if key in seen:
                raise SpecError(f"line {line}: key {shown(key)} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # In base 16 or 60 Python reads any length.
        if len(node.value) > MOST_NUMBER_TEXT:
            raise SpecError(
                f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits; "
                f"{MOST_NUMBER_TEXT} is most"
            )
        return int(super().construct_yaml_int(node))


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)


def read_text(path: str | Path) -> str:
    """What is in a file. Raises: SpecError naming a file that is not text, or larger than any that
    is read whole; OSError."""
    with open(path, "rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)  # a device may have no end
    if len(content) > MOST_FILE_BYTES:
        raise SpecError(f"{path}: larger than {MOST_FILE_BYTES >> 20} MiB: is it the right file?")
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not text: {error}") from None


def load_json(text: str, where: str) -> Any:
    """Parse JSON. Raises: SpecError naming `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not valid JSON: {error}") from None


def load_yaml(text: str, where: str) -> Any:
    """Parse YAML; a syntax error or a repeated key raises `SpecError` naming `where`."""
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_repeats(node, len(text))
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # The last three: of a value that is not of its kind (a date, a number too long), of depth.
        raise SpecError(f"{where}: not valid YAML: {_one_line(error)}") from None


def _check_repeats(root: yaml.Node, text_length: int) -> None:
    """Raises: SpecError where aliases make of a short text more than can be held, or a circle."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: yaml.Node) -> int:
        key = id(node)
        if key in inside:
            line = node.start_mark.line + 1
            raise SpecError(f"line {line}: a value that contains itself: write it out")
        if key not in sizes:
            inside.add(key)
            if isinstance(node, yaml.ScalarNode):
                sizes[key] = len(node.value) + 1
            elif isinstance(node, yaml.MappingNode):
                sizes[key] = 1 + sum(size(k) + size(v) for k, v in node.value)
            else:
                sizes[key] = 1 + sum(map(size, node.value))
            inside.discard(key)
        return sizes[key]

    if size(root) > 2 * text_length + MOST_REPEATED:
        raise SpecError(
            f"its aliases (*name) stand for more than {MOST_REPEATED} characters: write out what "
            "is meant"
        )


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _number(key: str, value: Any, where: str) -> Any:
    """Sizes with a unit ("80GiB") and exponents that YAML takes for text ("25e9"), as numbers."""
    if not isinstance(value, str) or not key.endswith(("_bytes", "_per_s", "_s", "_flops")):
        return value
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = match[2] if match else ""
    is_bytes = "bytes" in key
    try:
        if match is None or (unit and not is_bytes):
            raise ValueError
        number = float(match[1]) * (_UNITS[unit] if unit else 1)
        return int(number) if key.endswith("_bytes") else number
    except (ValueError, KeyError, OverflowError):
        example = " or a size such as 80GiB" if is_bytes else ""
        raise SpecError(f"{where}.{key}: expected a number{example}, got {shown(value)}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_encode(k): _encode(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Turn plain `value` into what the annotation `hint` asks for.

    Scalars pass through unchanged: their own record checks them first and knows the better message
    (`_check_type` looks at what is left).
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        members = [a for a in args if a is not type(None)]
        for member in members[1:] and members:
            with contextlib.suppress(SpecError):
                decoded = _decode(member, value, where)
                _check_type(member, decoded, where)
                return decoded
        return _decode(members[0], value, where)
    if origin is tuple:
        if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
            raise SpecError(f"{where}: expected a list, got {shown(value)}")
        inners = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(inners) != len(value):
            raise SpecError(f"{where}: expected {len(inners)} entries, got {len(value)}")
        return tuple(
            _decode(inner, v, f"{where}[{i}]")
            for i, (inner, v) in enumerate(zip(inners, value, strict=True))
        )
    if origin in (Mapping, FrozenMap):
        if not isinstance(value, Mapping):
            raise SpecError(f"{where}: expected a mapping, got {shown(value)}")
        return FrozenMap(
            (_decode(args[0], k, where), _decode(args[1], v, f"{where}.{k}"))
            for k, v in value.items()
        )
    if isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if issubclass(hint, Record):
            return hint.from_dict(value, where=where)
        if issubclass(hint, enum.Enum):
            names = [m.value for m in hint]
            if value not in names:
                raise unknown_key(value, names, where)
            return hint(value)
    return value


_SCALARS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    bool: ((bool,), "true or false"),
}


def _check_type(hint: Any, value: Any, where: str) -> None:
    """Raises: SpecError where a scalar in `value`, as `_decode` left it, is not of its type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return
        errors = []
        for member in args:
            try:
                if member is not type(None):
                    _check_type(member, value, where)
                    return
            except SpecError as error:
                errors.append(str(error))
        raise SpecError("; or ".join(errors))
    elif origin is tuple:
        many = len(args) == 2 and args[1] is Ellipsis
        for i, one in enumerate(value):
            _check_type(args[0] if many else args[i], one, f"{where}[{i}]")
    elif origin in (Mapping, FrozenMap):
        for key, one in value.items():
            _check_type(args[1], one, f"{where}.{key}")
    elif hint in _SCALARS:
        kinds, what = _SCALARS[hint]
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise SpecError(f"{where} must be {what}, got {shown(value)}")
