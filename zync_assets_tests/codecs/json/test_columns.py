"""JSON a column at a time gives what JSON record by record gives: random types, data by them and not, and damage."""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zync_assets.codecs.json.columns import columns_reader, has_columns
from zync_assets.codecs.json.values import json_reader
from zync_assets_tests.codecs.generated import EXAMPLES, INTS, LONGS, TEXTS, same

pytestmark = pytest.mark.usefixtures("both_ways")

TIMES = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30)).map(datetime.datetime.isoformat)

ODD_TIMES = (
    *(
        "0000-01-01T00:00:00",
        "0900-01-01T00:00:00",
        "2024-02-30T00:00:00",
        "2024-02-29T24:00:00",
        "2024-02-29T23:59:60",
    ),
    *("2024-02-29T23:59:59.123", "2024-02-29T23:59:59.1234567", "2024-02-29T23:59:59.12", "2024-02-29 23:59:59"),
)

# A type, and texts of values that mostly are of it.
SCALARS: list[tuple[pa.DataType, st.SearchStrategy[str]]] = [
    (pa.bool_(), st.sampled_from(["true", "false"])),
    (pa.int8(), st.integers(-130, 130).map(str)),
    (pa.int32(), INTS.map(str) | st.sampled_from(["-0", "1.0", "1e2", "2147483648"])),
    (pa.int64(), LONGS.map(str) | st.just(str(1 << 63))),
    (pa.float32(), st.floats(allow_nan=False).map(repr) | st.sampled_from(["-0", "1e39", "16777217", "0.1"])),
    (pa.float64(), st.floats().map(repr) | st.sampled_from(["-0", "-0.0", "1e400", "1" * 30, "1e-400", "-1e999"])),
    (pa.string(), TEXTS.map(json.dumps) | TEXTS.map(lambda text: json.dumps(text, ensure_ascii=False))),
    (pa.string(), st.sampled_from(['"\\ud800"', '"\\u0000"', '"\\/"', '"\t"', '"\\x"'])),
    (pa.binary(), st.binary(max_size=6).map(lambda raw: json.dumps(base64.b64encode(raw).decode()))),
    (pa.binary(), TEXTS.map(json.dumps)),
    (pa.date32(), st.dates().map(lambda day: f'"{day}"') | st.sampled_from(['"2024-02-30"', '"20240229"', "7"])),
    (pa.timestamp("us", "UTC"), TIMES.map(lambda time: f'"{time}"') | TIMES.map(lambda time: f'"{time}Z"')),
    (
        pa.timestamp("us", "UTC"),
        st.sampled_from(['"2024-01-01"', '"2024-01-01T25:00"', '"2024-01-01T01:02:03.123456789+02:00"'])
        | st.sampled_from([f'"{time}Z"' for time in ODD_TIMES]),
    ),
    (pa.decimal128(9, 2), st.decimals(-(10**8), 10**8, allow_nan=False, places=3).map(str)),
    (
        pa.decimal128(9, 2),
        st.sampled_from(["1e2", '"1.10"', '"1_0"', '" 1"', "1.10", "1.1e1", "-0", "-0.00", '"NaN"', "1e400"]),
    ),
    (pa.decimal128(38, 10), st.decimals(allow_nan=False, allow_infinity=False).map(str)),
]
WHITE = st.sampled_from(["", "", "", " ", "\n", "\r\n\t"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
).map(json.dumps)


@st.composite
def typed(draw: st.DrawFn, depth: int) -> tuple[pa.DataType, st.SearchStrategy[str]]:
    choice = draw(st.integers(0, 5)) if depth else 0
    if choice <= 3:
        kind, texts = draw(st.sampled_from(SCALARS))
        return kind, texts
    if choice == 4:
        kind, texts = draw(typed(depth - 1))
        return pa.list_(kind), st.lists(texts | st.just("null"), max_size=3).map(lambda items: f"[{','.join(items)}]")
    return draw(structs(depth - 1))


@st.composite
def structs(draw: st.DrawFn, depth: int) -> tuple[pa.DataType, st.SearchStrategy[str]]:
    fields = {f"f{index}": draw(typed(depth)) for index in range(draw(st.integers(1, 4)))}

    @st.composite
    def texts(draw: st.DrawFn) -> str:
        parts: list[str] = []
        for name, (_, values) in fields.items():
            for _ in range(draw(st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2]))):
                text = draw(st.one_of(values, values, values, st.just("null"), ANY))
                parts.append(f"{draw(WHITE)}{json.dumps(name)}:{draw(WHITE)}{text}")
        if draw(st.integers(0, 3)) == 0:
            parts.append(
                f"{json.dumps(draw(TEXTS))}:{draw(st.one_of(ANY, st.sampled_from(['NaN', '01', '-', '1e999'])))}"
            )
        return "{" + ",".join(draw(st.permutations(parts))) + "}"

    return pa.struct([(name, kind) for name, (kind, _) in fields.items()]), texts()


@st.composite
def batches(draw: st.DrawFn) -> tuple[pa.DataType, list[bytes | None]]:
    kind, texts = draw(structs(2))
    made: list[bytes | None] = []
    for text in draw(st.lists(st.none() | texts, min_size=1, max_size=6)):
        payload = None if text is None else text.encode(errors="surrogatepass")
        how = draw(st.sampled_from(["whole", "whole", "whole", "cut", "changed", "longer", "other"]))
        if payload is not None and how == "cut":
            payload = payload[: draw(st.integers(0, len(payload)))]
        elif payload is not None and how == "changed":
            at = draw(st.integers(0, len(payload) - 1))
            payload = (
                payload[:at]
                + draw(st.sampled_from(b'\n{}[]",:0-\\ \xff').map(lambda byte: bytes([byte])))
                + payload[at + 1 :]
            )
        elif payload is not None and how == "longer":
            payload += draw(st.sampled_from([b" ", b"\n", b"{}", b'{"f0":null}', b"}", b"x", b"\0"]))
        elif how == "other":
            payload = draw(st.sampled_from([b"", b" ", b"null", b"[]", b"1", b"{", b"}", b'{"f0":', b"1}"]))
        made.append(payload)
    return kind, made


DEEP = b'{"f0":1,"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}"
MONEY = pa.struct([("f0", pa.list_(pa.decimal128(9, 2)))])
INT, DOUBLE, REAL, TEXT = (pa.struct([("f0", kind)]) for kind in (pa.int32(), pa.float64(), pa.float32(), pa.string()))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(batches())
@example((INT, [b'{"f0":1}{"f0":2}', b"", b'{"f0":3}']))
@example((INT, [b'{"f0":', b"1}", b'{"f0":2}{"f0":3}']))
@example((INT, [DEEP, b'{"f0":2,"x":' + b"9" * 5_000 + b"}"]))
@example((DOUBLE, [b'{"f0":-0}', b'{"f0":-0.0}', b'{"f0":0}']))
@example((DOUBLE, [b'{"f0":NaN}', b'{"f0":-Infinity}', b'{"f0":1e400}', b'{"f0":1}']))
@example((REAL, [b'{"f0":1e39}', b'{"f0":16777217}', b'{"f0":0.1}', b'{"f0":1.00000017881393432617187499}']))
@example((TEXT, [b'{"f0":"\\ud800"}', b'{"f0":"\xff"}', b'{"f0":"\\ud83d\\ude00"}', b'{"f0":"\xc3\xa9"}']))
@example((MONEY, [b'{"f0":[10000000]}', b'{"f0":[-9999999.99,-10000000]}', b'{"f0":["10000000",9999999]}']))
@example((INT, [b'{"f0":1,"f0":2}', b'{"x":NaN,"f0":1}', b'{"\\u00660":4}', b'\xef\xbb\xbf{"f0":1}']))
def test_columns_are_what_the_records_are_one_by_one(batch: tuple[pa.DataType, list[Any]]) -> None:
    kind, payloads = batch
    assert has_columns(kind)
    whole = pa.array(payloads, pa.binary())
    # Also reads each text alone. In a batch, pyarrow's refusal of one text would hide its acceptance of another text.
    for column in (whole, *(whole.slice(index, 1) for index in range(len(whole)))):
        (values, errors), (expected, wrong) = columns_reader(kind)(column), json_reader(kind)(column)
        values.validate(full=True)
        assert errors == wrong
        assert values.type == kind and same(values, expected)


def test_one_bad_text_among_many_costs_only_itself() -> None:
    texts = [b'{"f0":%d}' % number for number in range(1_000)]
    texts[700] = b'{"f0":"x"}'
    values, errors = columns_reader(INT)(pa.array(texts))
    assert list(errors) == [700]
    assert [row["f0"] if row else None for row in values.to_pylist()] == [*range(700), None, *range(701, 1_000)]


@pytest.mark.parametrize("kind", [pa.int32(), pa.struct([]), pa.struct([("m", pa.map_(pa.string(), pa.int32()))])])
def test_what_pyarrow_can_t_read_goes_record_by_record(kind: pa.DataType) -> None:
    assert not has_columns(kind)
    assert columns_reader(kind)(pa.array([b'{"m":{"a":1}}', None], pa.binary()))[0].type == kind


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        (pa.float64(), "1e400", "1E+400 is out of the range of double"),
        (pa.float32(), "-1e39", "-1E+39 is out of the range of float"),
        (
            pa.timestamp("us", "UTC"),
            '"2024-01-01T01:02:03.1234567Z"',
            "'2024-01-01T01:02:03.1234567Z' is finer than a microsecond; give the field the type string",
        ),
    ],
)
def test_a_value_that_its_type_can_t_hold_is_an_error(kind: pa.DataType, text: str, error: str) -> None:
    values, errors = columns_reader(pa.struct([("f0", kind)]))(pa.array([b'{"f0":%b}' % text.encode()]))
    assert values.to_pylist() == [None]
    assert errors == {0: f"value.f0: {error}"}


@given(
    st.datetimes(), st.sampled_from(["", "Z", "+00:00", "-05:30", "+14:00"]), st.sampled_from(["auto", "milliseconds"])
)
@example(datetime.datetime(2000, 2, 29, 23, 59, 59, 999_999), "Z", "auto")
@example(datetime.datetime(1900, 3, 1), "-23:59", "auto")
@example(datetime.datetime(9998, 12, 31, 23, 59, 59), "-14:00", "milliseconds")
def test_every_time_is_the_same_moment(time: datetime.datetime, zone: str, places: str) -> None:
    text = time.isoformat(timespec=places) + zone
    kind = pa.struct([("f0", pa.timestamp("us", "UTC"))])
    payloads = pa.array([b'{"f0":"%b"}' % text.encode()])
    (values, errors), (expected, wrong) = columns_reader(kind)(payloads), json_reader(kind)(payloads)
    assert errors == wrong
    assert values.equals(expected)


@pytest.mark.parametrize(
    "text",
    [
        *("2023-02-29T00:00:00Z", "1900-02-29T00:00:00Z", "2024-04-31T00:00:00Z", "2024-13-01T00:00:00Z"),
        *("2024-01-00T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:60:00Z", "2024-01-01T00:00:60Z"),
        *("2024-01-01T00:00:00+24:00", "2024-01-01T00:00:00ZZ", "2024-01-01T00:00:0aZ", "2024-01-01T00:00:00.12aZ"),
    ],
)
def test_a_time_that_is_none_is_an_error(text: str) -> None:
    kind = pa.struct([("f0", pa.timestamp("us", "UTC"))])
    payloads = pa.array([b'{"f0":"2024-01-01T00:00:00Z"}', b'{"f0":"%b"}' % text.encode()])
    (values, errors), (expected, wrong) = columns_reader(kind)(payloads), json_reader(kind)(payloads)
    assert errors == wrong and list(errors) == [1]
    assert values.equals(expected)


def test_noughts_after_the_microseconds_lose_nothing() -> None:
    values, errors = columns_reader(pa.struct([("f0", pa.timestamp("us", "UTC"))]))(
        pa.array([b'{"f0":"2024-01-01T01:02:03.123456000Z"}'])
    )
    assert errors == {}
    assert values[0]["f0"].value == 1704070923123456
