"""The state of verl's data loader as JSON, and back: what verl's own checkpoints pickle.

JSON's own values stand for themselves; what it lacks is an object with one key that begins with
"$".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class NotJson(ValueError):
    """State that cannot be written as JSON, or text that is no such state."""


def to_json(value: Any, where: str = "") -> Any:
    """Args: where: its place in the whole, for messages. Raises: NotJson naming the place."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": to_json(list(value), where)}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json(one, f"{where}.{key}") for key, one in value.items()}
        pairs = [[to_json(k, where), to_json(v, f"{where}.{k}")] for k, v in value.items()]
        return {"$dict": pairs}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _array_to_json(value.detach().cpu().numpy(), where)}
    if isinstance(value, np.ndarray):
        return {"$array": _array_to_json(value, where)}
    if isinstance(value, np.generic):
        return {"$number": _array_to_json(np.asarray(value), where)}
    raise NotJson(f"{where.lstrip('.') or 'it'} is a {type(value).__name__}")


def from_json(said: Any) -> Any:
    """Raises: NotJson."""
    if isinstance(said, list):
        return [from_json(one) for one in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        (kind,) = said
        if kind in _READ:
            try:
                return _READ[kind](said[kind])
            except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as error:
                raise NotJson(f"not a {kind}: {error}") from None
    return {key: from_json(one) for key, one in said.items()}


def _array_to_json(array: Any, where: str) -> dict[str, Any]:
    if array.dtype.hasobject:
        raise NotJson(f"{where.lstrip('.') or 'it'} is an array of objects")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _array(said: Any) -> Any:
    dtype = np.dtype(said["dtype"])
    if dtype.hasobject:
        raise ValueError("an array of objects")
    data = base64.b64decode(said["data"], validate=True)
    return np.frombuffer(data, dtype=dtype).reshape(said["shape"]).copy()


_READ: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda said: tuple(from_json(said)),
    "$dict": lambda said: {from_json(key): from_json(value) for key, value in said},
    "$bytes": lambda said: base64.b64decode(said, validate=True),
    "$tensor": lambda said: torch.from_numpy(_array(said)),
    "$array": _array,
    "$number": lambda said: _array(said)[()],
}
