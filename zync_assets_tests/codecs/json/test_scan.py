"""The scan of JSON texts reads plain texts itself, and leaves the others to another reader.

``test_columns`` compares the scan's values with the values of a reader that takes one text after the other.
"""

from __future__ import annotations

import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.codecs.json import scan as scanner
from zync_assets.codecs.json.scan import scan

ROW = pa.struct([("id", pa.int64()), ("name", pa.string()), ("price", pa.decimal128(9, 2)), ("rate", pa.float64())])
ENVELOPE = pa.struct([("before", ROW), ("after", ROW), ("op", pa.string()), ("big", pa.bool_()), ("small", pa.int8())])


def read(kind: pa.DataType, *texts: str) -> tuple[list[Any], list[bool]]:
    found = scan(kind, pa.array([text.encode(errors="surrogatepass") for text in texts]))
    assert found is not None
    values, odd = found
    values.validate(full=True)
    return values.to_pylist(), odd.tolist()


def test_an_envelope_is_read_in_any_order_with_white_space_and_unknown_fields() -> None:
    row = {"id": 7, "name": 'a "b" \\ \n é 😀', "price": None, "rate": 0.1}
    first = json.dumps({"before": None, "after": row, "op": "u", "big": True, "small": -128})
    second = json.dumps({"x": [1, {"op": [[]]}, "]}"], "small": 127, "after": {**row, "y": {}}, "op": "c"}, indent=1)
    third = json.dumps({"op": "d", "after": None, "before": row}, ensure_ascii=False)
    values, odd = read(ENVELOPE, first, second, third)
    assert odd == [False] * 3
    none = dict.fromkeys(["before", "after", "op", "big", "small"])
    assert values[0] == {**none, "after": row, "op": "u", "big": True, "small": -128}
    assert values[1] == {**none, "after": row, "op": "c", "small": 127}
    assert values[2] == {**none, "before": row, "op": "d"}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.int64(), "1732700000123456789", 1732700000123456789),
        (pa.int64(), "9223372036854775807", (1 << 63) - 1),
        (pa.int64(), "-9223372036854775807", 1 - (1 << 63)),
        (pa.int16(), "-32768", -32768),
        (pa.float64(), "0.1", 0.1),
        (pa.float64(), "12345678901234567", 12345678901234567.0),
        (pa.float64(), "0.30000000000000004", 0.30000000000000004),
        (pa.float64(), "1E-7", 1e-7),
        (pa.decimal128(9, 2), "-1.5", decimal.Decimal("-1.50")),
        (pa.decimal128(9, 2), '"1.50"', decimal.Decimal("1.50")),
        (pa.decimal128(38, 18), "0.00000000000000001", decimal.Decimal("1e-17")),
        (pa.bool_(), "false", False),
        (pa.string(), '""', ""),
        (pa.string(), r'"\u0000\b\f\n\r\t\/\\\"\u00e9\u20ac\ud83d\ude00"', '\0\b\f\n\r\t/\\"é€😀'),
        (pa.string(), "null", None),
    ],
)
def test_a_value_is_read(kind: pa.DataType, text: str, value: Any) -> None:
    assert read(pa.struct([("f", kind)]), f'{{"f": {text}}}') == ([{"f": value}], [False])


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1", "null", "[]", "{", "}", '{"f":1', '{"f":1}}', '{"f":1} x', '{"f":1,}', '{,"f":1}', "{f:1}"),
        *('{"f" 1}', '{"f":}', '{"f":1 2}', '{"f":01}', '{"f":+1}', '{"f":1.}', '{"f":.5}', '{"f":-}', '{"f":1e}'),
        *('{"f":1.0}', '{"f":1e2}', '{"f":"1"}', '{"f":true}', '{"f":{}}', '{"f":[1]}', '{"f":128}', '{"f":-129}'),
        *('{"f":9223372036854775808}', '{"f":NaN}', '{"f":nul}', '{"f":1,"f":1}', '{"f":null,"f":1}', '{"\\u0066":1}'),
        *('{"x":01}', '{"x":tru}', '{"x":-Infinity}', '{"x":1e99999}', '{"x":"\\x"}', '{"x":"\t"}', '{"x":"\\ud800"}'),
        *('{"x":"\\ude00"}', '{"x":"\\ud800\\u0041"}', '{"x":"\\u00g0"}', '{"x":"\\u00"}', '{"x":[1,]}', '{"x":[}'),
        *('{"x":{"y":1]}', '{"x":' + "[" * 64 + "]" * 64 + "}", '{"x":' + "9" * 400 + "}", '{"x":"'),
    ],
)
def test_an_odd_text_is_left_to_another_reader_and_its_neighbours_are_not(text: str) -> None:
    whole = '{"f":-7}'
    values, odd = read(pa.struct([("f", pa.int8())]), whole, text, whole)
    assert odd == [False, True, False]
    assert [values[0], values[2]] == [{"f": -7}, {"f": -7}]


@given(st.lists(st.text(), min_size=1, max_size=9), st.booleans())
def test_every_text_comes_back(texts: list[str], ascii_only: bool) -> None:
    payloads = [json.dumps({"f": text}, ensure_ascii=ascii_only) for text in texts]
    assert read(pa.struct([("f", pa.string())]), *payloads) == ([{"f": text} for text in texts], [False] * len(texts))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_every_double_comes_back(numbers: list[float]) -> None:
    payloads = [json.dumps({"f": number}) for number in numbers]
    values, odd = read(pa.struct([("f", pa.float64())]), *payloads)
    assert odd == [False] * len(numbers)
    assert [repr(value["f"]) for value in values] == list(map(repr, numbers))


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.map_(pa.string(), pa.int32()), pa.struct([]), pa.null()])
def test_a_type_of_another_kind_is_left_to_another_reader(kind: pa.DataType) -> None:
    assert scan(pa.struct([("f", kind)]), pa.array([b"{}"])) is None


def test_texts_that_are_not_utf_8_are_left_to_another_reader_and_a_null_is_odd() -> None:
    kind = pa.struct([("f", pa.string())])
    assert scan(kind, pa.array([b'{"f":"\xff"}'])) is None
    found = scan(kind, pa.array([b'{"f":"a"}', None, b'{"f":"b"}'])[1:])
    assert found is not None
    assert found[1].tolist() == [True, False]
    assert found[0].to_pylist()[1] == {"f": "b"}


def test_many_texts_of_a_wide_type_are_read_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "MOST_CELLS", 7)
    kind = pa.struct([("f", pa.int32()), ("g", pa.string())])
    texts = [f'{{"f":{number},"g":"{"é" * number}"}}' if number % 3 else "{" for number in range(10)]
    values, odd = read(kind, *texts)
    assert odd == [number % 3 == 0 for number in range(10)]
    assert values == [{"f": number, "g": "é" * number} if number % 3 else None for number in range(10)]
