"""A message or a reply as one stretch of bytes: for Ray a dozen arrays are a third more work than one.

First an int64 for each field: a number's value, or the length of what follows. Then arrays of int64, arrays of int32,
so that all lie where their type wants them, and bytes and text.
"""

from typing import NamedTuple, TypeVar, get_type_hints

import numpy as np

from sam.sharing.messages import Message, Reply

NUMBERS = (int, bool)
WIDE = {"since", "offsets", "bases", "ends"}  # int64, all other arrays are int32
PAIRS = {"names"}  # [n, 2]
Packed = TypeVar("Packed", Message, Reply)


class Form(NamedTuple):
    """How the fields of a kind of message lie in its bytes: their names and types, and the order of those with text."""

    types: dict[str, type]
    order: list[str]


def _form(kind: type) -> Form:
    types = get_type_hints(kind)
    ranks = {name: (type_ is not np.ndarray, name not in WIDE) for name, type_ in types.items()}
    return Form(types, sorted((name for name in types if types[name] not in NUMBERS), key=ranks.get))


FORMS = {kind: _form(kind) for kind in (Message, Reply)}


def pack(message: Message | Reply) -> bytes:
    """The bytes of `message`."""
    form, values = FORMS[type(message)], message._asdict()
    parts = []
    for name in form.order:
        value = values[name]
        if isinstance(value, np.ndarray):
            value = value.astype(np.int64 if name in WIDE else np.int32, copy=False).tobytes()
        elif isinstance(value, str):
            value = value.encode()
        parts.append(value)
        values[name] = len(value)
    return b"".join([np.array([int(value) for value in values.values()], np.int64).tobytes(), *parts])


def unpack(kind: type[Packed], packed: bytes) -> Packed:
    """The message whose bytes they are; its arrays are views of them.

    Raises:
        ValueError: they are not the bytes of one.
    """
    form = FORMS[kind]
    values = dict(zip(form.types, np.frombuffer(packed, np.int64, len(form.types)).tolist(), strict=True))
    begin = 8 * len(values)
    if begin + sum(values[name] for name in form.order) != len(packed):
        raise ValueError(f"{len(packed)} bytes that are no {kind.__name__}: is the other end of another release?")
    for name in form.order:
        length = values[name]
        if (type_ := form.types[name]) is np.ndarray:
            dtype = np.dtype(np.int64 if name in WIDE else np.int32)
            array = np.frombuffer(packed, dtype, length // dtype.itemsize, begin)
            values[name] = array.reshape(-1, 2) if name in PAIRS else array
        else:
            text = packed[begin : begin + length]
            values[name] = text.decode() if type_ is str else text
        begin += length
    for name, type_ in form.types.items():
        if type_ is bool:
            values[name] = bool(values[name])
    return kind(**values)
