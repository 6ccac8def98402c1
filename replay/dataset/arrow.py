"""Rows as Arrow columns and back, without touching a token.

The columns follow from the fields of a struct. Packed numbers are joined into one buffer, and the
lengths tell where each list begins.
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

PLAIN = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
PACKED = {Ids: pa.int32(), Logprobs: pa.float32()}
ITEM_BYTES = 4


@cache
def fields(row: type[msgspec.Struct]) -> list[pa.Field]:
    return [pa.field(field.name, arrow_type(field.type)) for field in _fields(row)]


@cache
def _fields(row: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """To find them takes longer than to fill a column."""
    return msgspec.structs.fields(row)


def arrow_type(kind: Any) -> pa.DataType:
    kind = _without_none(kind)
    if kind in PACKED:
        return pa.list_(PACKED[kind])
    if get_origin(kind) is list:
        return pa.list_(pa.struct(fields(get_args(kind)[0])))
    return PLAIN[kind]


def _without_none(kind: Any) -> Any:
    """Words from a closed set are strings here, too."""
    if get_origin(kind) in (Union, types.UnionType):
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    return kind if kind in PLAIN or kind in PACKED or get_origin(kind) is list else str


def columns(row: type[msgspec.Struct], rows: Sequence[Any]) -> list[pa.Array]:
    return [array(field.type, list(map(attrgetter(field.name), rows))) for field in _fields(row)]


def array(kind: Any, values: list[Any]) -> pa.Array:
    kind = _without_none(kind)
    if kind in PACKED:
        return _packed(PACKED[kind], values)
    if get_origin(kind) is list:
        return nested(get_args(kind)[0], values)
    return pa.array(values, PLAIN[kind])


def nested(row: type[msgspec.Struct], lists: Sequence[Sequence[Any]]) -> pa.Array:
    """Lists of structs."""
    flat = list(chain.from_iterable(lists))
    structs = pa.StructArray.from_arrays(columns(row, flat), fields=fields(row))
    return pa.ListArray.from_arrays(_offsets([len(one) for one in lists]), structs)


def _packed(item: pa.DataType, values: list[bytes | None]) -> pa.Array:
    joined = b"".join(value for value in values if value is not None)
    items = pa.Array.from_buffers(item, len(joined) // ITEM_BYTES, [None, pa.py_buffer(joined)])
    offsets = _offsets([len(value or b"") // ITEM_BYTES for value in values])
    missing = pa.array([value is None for value in values]) if None in values else None
    return pa.ListArray.from_arrays(offsets, items, mask=missing)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), pa.int32())


def rows(row: type[msgspec.Struct], found: dict[str, pa.Array], count: int) -> list[Any]:
    """The structs that such columns were made of; a column that is not there has its default."""
    values = []
    for field in _fields(row):
        if field.name in found:
            values.append(_values(field.type, found[field.name]))
        elif field.required:
            raise KeyError(field.name)
        else:
            values.append([_default(field)] * count)
    names = row.__struct_fields__
    return [row(**dict(zip(names, one, strict=True))) for one in zip(*values, strict=True)]


def table_rows(row: type[msgspec.Struct], table: pa.Table) -> list[Any]:
    found = {name: table[name].combine_chunks() for name in table.column_names}
    return rows(row, found, len(table))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if made else field.default


def _values(kind: Any, column: pa.Array) -> list[Any]:
    kind = _without_none(kind)
    column = column.cast(arrow_type(kind))
    if kind in PACKED:
        return _unpacked(kind, column)
    if get_origin(kind) is list:
        return unnested(get_args(kind)[0], column)
    values: list[Any] = column.to_pylist()
    return values


def unnested(row: type[msgspec.Struct], column: pa.Array) -> list[Any]:
    structs = column.flatten()
    found = dict(zip((f.name for f in structs.type), structs.flatten(), strict=True))
    flat = rows(row, found, len(structs))
    return [flat[first:end] for first, end in _spans(column)]


def _unpacked(kind: Any, column: pa.Array) -> list[bytes | None]:
    items = column.flatten().to_numpy(zero_copy_only=False)
    items = np.ascontiguousarray(items, np.dtype(PACKED[kind].to_pandas_dtype()))
    packed = items.view(np.uint8)
    there = column.is_valid().to_pylist()
    return [
        packed[first * ITEM_BYTES : end * ITEM_BYTES].tobytes() if valid else None
        for valid, (first, end) in zip(there, _spans(column), strict=True)
    ]


def _spans(column: pa.Array) -> list[tuple[int, int]]:
    """Where each list lies in what `flatten` gives, which leaves out what is null."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return list(pairwise(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).tolist()))
