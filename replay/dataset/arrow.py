"""Converts rows to Arrow columns and back, without a Python object per token.

The columns follow from the fields of a struct. Packed numbers are joined into one buffer; their lengths
give the offsets of the lists.
"""

import types
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa

from replay.dataset.rows import Ids, Logprobs

PLAIN_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
PACKED_TYPES = {Ids: pa.int32(), Logprobs: pa.float32()}
ITEM_BYTES = 4


@cache
def fields(row: type[msgspec.Struct]) -> list[pa.Field]:
    return [pa.field(field.name, arrow_type(field.type)) for field in _fields(row)]


@cache
def _fields(row: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Cached: msgspec's lookup takes longer than filling a column."""
    return msgspec.structs.fields(row)


def arrow_type(kind: Any) -> pa.DataType:
    kind = _without_none(kind)
    if kind in PACKED_TYPES:
        return pa.list_(PACKED_TYPES[kind])
    if get_origin(kind) is list:
        return pa.list_(pa.struct(fields(get_args(kind)[0])))
    return PLAIN_TYPES[kind]


def _without_none(kind: Any) -> Any:
    """The type without `| None`; Literal types are strings."""
    if get_origin(kind) in (Union, types.UnionType):
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    return kind if kind in PLAIN_TYPES or kind in PACKED_TYPES or get_origin(kind) is list else str


def columns(row: type[msgspec.Struct], rows: Sequence[Any]) -> list[pa.Array]:
    return [to_array(field.type, list(map(attrgetter(field.name), rows))) for field in _fields(row)]


def to_array(kind: Any, values: list[Any]) -> pa.Array:
    kind = _without_none(kind)
    if kind in PACKED_TYPES:
        return _packed_array(PACKED_TYPES[kind], values)
    if get_origin(kind) is list:
        return to_list_array(get_args(kind)[0], values)
    return pa.array(values, PLAIN_TYPES[kind])


def to_list_array(row: type[msgspec.Struct], lists: Sequence[Sequence[Any]]) -> pa.Array:
    """A column of lists of structs."""
    flat = list(chain.from_iterable(lists))
    structs = pa.StructArray.from_arrays(columns(row, flat), fields=fields(row))
    return pa.ListArray.from_arrays(_offsets([len(items) for items in lists]), structs)


def _packed_array(item: pa.DataType, values: list[bytes | None]) -> pa.Array:
    joined = b"".join(value for value in values if value is not None)
    items = pa.Array.from_buffers(item, len(joined) // ITEM_BYTES, [None, pa.py_buffer(joined)])
    offsets = _offsets([len(value or b"") // ITEM_BYTES for value in values])
    missing = pa.array([value is None for value in values]) if None in values else None
    return pa.ListArray.from_arrays(offsets, items, mask=missing)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), pa.int32())


def from_columns(row: type[msgspec.Struct], arrays: dict[str, pa.Array], count: int) -> list[Any]:
    """Structs from their columns. A missing column gets its default; without one it is a KeyError."""
    values = []
    for field in _fields(row):
        if field.name in arrays:
            values.append(_values(field.type, arrays[field.name]))
        elif field.required:
            raise KeyError(field.name)
        else:
            values.append([_default(field)] * count)
    names = row.__struct_fields__
    return [row(**dict(zip(names, line, strict=True))) for line in zip(*values, strict=True)]


def from_table(row: type[msgspec.Struct], table: pa.Table) -> list[Any]:
    arrays = {name: table[name].combine_chunks() for name in table.column_names}
    return from_columns(row, arrays, len(table))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if has_factory else field.default


def _values(kind: Any, column: pa.Array) -> list[Any]:
    kind = _without_none(kind)
    column = column.cast(arrow_type(kind))
    if kind in PACKED_TYPES:
        return _packed_values(kind, column)
    if get_origin(kind) is list:
        return from_list_array(get_args(kind)[0], column)
    values: list[Any] = column.to_pylist()
    return values


def from_list_array(row: type[msgspec.Struct], column: pa.Array) -> list[Any]:
    structs = column.flatten()
    arrays = dict(zip((f.name for f in structs.type), structs.flatten(), strict=True))
    flat = from_columns(row, arrays, len(structs))
    return [flat[first:end] for first, end in _list_bounds(column)]


def _packed_values(kind: Any, column: pa.Array) -> list[bytes | None]:
    items = column.flatten().to_numpy(zero_copy_only=False)
    items = np.ascontiguousarray(items, np.dtype(PACKED_TYPES[kind].to_pandas_dtype()))
    packed = items.view(np.uint8)
    is_valid = column.is_valid().to_pylist()
    return [
        packed[first * ITEM_BYTES : end * ITEM_BYTES].tobytes() if valid else None
        for valid, (first, end) in zip(is_valid, _list_bounds(column), strict=True)
    ]


def _list_bounds(column: pa.Array) -> list[tuple[int, int]]:
    """First and end index of each list in the flattened column, which leaves out nulls."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return list(pairwise(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).tolist()))
