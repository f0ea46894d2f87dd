"""The functions of Zed in Spark SQL, and casts.

A function that Spark SQL can't give the result of is a problem with the Spark SQL to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from zync_assets.pipeline_file.fields import suggestion
from zync_assets.pipeline_file.zed.nodes import Type, ZedPlace, ZedProblem
from zync_assets.pipeline_file.zed.values import NUMBERS, PRODUCT, TYPES, Demands, Term, type_kind, type_sql
from zync_assets.spark.sql import text_sql

_CASTABLE = {
    "bool": ("number", "bool"),
    "int": ("number", "text", "time"),
    "float": ("number", "text"),
    "text": ("int", "text", "bool"),
    "bytes": ("text", "bytes"),
    "time": ("int", "text", "time"),
}
"""Kind of a type → the kinds of values that a cast to it takes."""
_INTEGERS = "('tinyint', 'smallint', 'int', 'bigint')"


def cast(demands: Demands, term: Term, target: Type, place: ZedPlace) -> Term:
    """A value as another type."""
    kind, sql = type_kind(target), type_sql(target)
    if term.constant == "null":
        return Term(f"CAST(NULL AS {sql})", kind, constant="null")
    if kind in ("record", "array"):
        raise ZedProblem(place, "a cast to a record or an array is not supported; cast each field")
    if kind == "text" and term.kind in ("float", "time"):
        cure = (
            "strftime(…) for a time" if term.kind == "time" else "in Spark SQL: format_number(…) or CAST(… AS STRING)"
        )
        raise ZedProblem(place, f"Zed writes such a value in another way than Spark SQL; {cure}")
    demands.demand(term, _CASTABLE[kind], place, f"is cast to {target.name}")
    if kind == term.kind == "text" or (kind == term.kind == "time"):
        return term
    text = f"CAST({term.sql} AS STRING)"
    if kind == "time":
        number = f"timestamp_micros(CAST({text} AS BIGINT) div 1000L)"
        if term.kind in NUMBERS:
            return Term(f"timestamp_micros({term.within(PRODUCT)} div 1000L)", kind)
        if term.kind == "text":
            return Term(f"CAST({term.sql} AS TIMESTAMP)", kind)
        return Term(f"IF(typeof({term.sql}) IN {_INTEGERS}, {number}, CAST({text} AS TIMESTAMP))", kind)
    plain_cast = Term(f"CAST({term.sql} AS {sql})", kind, sure=term.sure)
    if kind != "int" or term.kind in (*NUMBERS, "text"):
        return plain_cast
    nanos = f"unix_micros(CAST({text} AS TIMESTAMP)) * 1000L"
    if sql != "BIGINT":
        nanos = f"CAST({nanos} AS {sql})"
    if term.kind == "time":
        nanos = f"unix_micros({term.sql}) * 1000L"
        return Term(nanos, kind, PRODUCT) if sql == "BIGINT" else Term(f"CAST({nanos} AS {sql})", kind)
    return Term(f"IF(typeof({term.sql}) = 'timestamp', {nanos}, {plain_cast.sql})", kind)


def function(demands: Demands, name: str, terms: Sequence[Term], place: ZedPlace) -> Term:
    """A call of a function. ZedProblem if Spark SQL has no such function, or the call has other arguments."""
    if name in TYPES or name in _UNSIGNED:
        if len(terms) != 1:
            raise ZedProblem(place, f"`{name}` takes one argument")
        return cast(demands, terms[0], Type(name, (), place), place)
    if name in _CURES:
        raise ZedProblem(place, f"the function `{name}` is not supported; {_CURES[name]}")
    if name not in _FUNCTIONS:
        cure = suggestion(name, (*_FUNCTIONS, *TYPES)) or f"; known here: {', '.join(_FUNCTIONS)}"
        raise ZedProblem(place, f"the function `{name}` is not supported{cure}")
    least, most, build = _FUNCTIONS[name]
    if not least <= len(terms) <= most:
        range_text = str(least) if least == most else f"{least} to {most}" if most < 99 else f"at least {least}"
        raise ZedProblem(place, f"`{name}` takes {range_text} argument{'s' * (most != 1)}, not {len(terms)}")
    return build(demands, terms, place)


_UNSIGNED = ("uint8", "uint16", "uint32", "uint64", "float16", "duration", "ip", "net")
_AGGREGATE = "a rule of type group or view has aggregates"
_MISSING = "in Spark SQL: value.name IS NOT NULL (a missing field is null in the lake)"
_CURES = {
    "has": _MISSING,
    "missing": _MISSING,
    "quiet": "name only the fields that each output has: one rule for each set of fields",
    "now": "use what the record holds, such as in.kafka.time",
    "ksuid": "use what the record holds, such as in.kafka.offset",
    "typeof": "it stands in typeof(field) == <type> and cast(null, typeof(field))",
    "is": "it takes a field and a type: is(in.value.name, <string>)",
    "cast": "it takes a value and a type: cast(in.value.name, <string>)",
    "regexp": "in Spark SQL: regexp_extract(text, pattern)",
    "regexp_replace": "in Spark SQL: regexp_replace(text, pattern, replacement)",
    "grep": "in Spark SQL: contains(text, part)",
    "error": "in Spark SQL: raise_error(text) puts the record into quarantine",
    "map": "in Spark SQL: transform(array, x -> …)",
    "shape": "name the fields in a record, each with a cast",
    "fill": "name the fields in a record",
    "crop": "name the fields in a record",
    "order": "name the fields in a record, in their order",
    "flatten": "name the fields in a record",
    "parse_zson": "in Spark SQL: from_json(text, schema)",
    "parse_uri": "in Spark SQL: parse_url(text, part)",
    "under": "a union has one type in the lake",
    "count": _AGGREGATE,
    "sum": _AGGREGATE,
    "avg": _AGGREGATE,
    "collect": _AGGREGATE,
    "union": _AGGREGATE,
    "any": _AGGREGATE,
}


def _text(sql: str, kind: str = "text", other_count: int = 0) -> Callable[[Demands, Sequence[Term], ZedPlace], Term]:
    """A function of texts. ``other_count``: the arguments after the first ones that are no texts."""

    def build(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
        for term in terms[: len(terms) - other_count]:
            demands.demand(term, ("text",), place, "is an argument of a function of texts")
        return Term(sql.format(*(term.sql for term in terms)), kind, sure=all(term.sure for term in terms))

    return build


def _number(sql: str, kind: str | None = None) -> Callable[[Demands, Sequence[Term], ZedPlace], Term]:
    """A function of numbers, with a null taken as 0. ``kind``: of the result, None: of the first argument."""

    def build(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
        for term in terms:
            demands.demand(term, NUMBERS, place, "is an argument of a function of numbers")
        parts = (term.sql if term.sure else f"coalesce({term.sql}, 0Y)" for term in terms)
        return Term(sql.format(*parts), kind or terms[0].kind or "number", sure=True)

    return build


def _rounding(name: str) -> Callable[[Demands, Sequence[Term], ZedPlace], Term]:
    def build(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
        number = terms[0]
        demands.demand(number, NUMBERS, place, f"is the argument of {name}")
        if number.kind == "int":
            return number
        if number.kind != "float":
            raise ZedProblem(place, f"`{name}` needs a number of a plain type; write {name}(float64(…))")
        # Spark's function gives a bigint. Larger numbers are whole, infinity and NaN stay.
        is_small, whole = f"abs({number.sql}) < 4503599627370496D", f"CAST({name}({number.sql}) AS DOUBLE)"
        return Term(f"IF({is_small}, {whole}, {number.sql})", "float", sure=number.sure)

    return build


def _len(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    argument = terms[0]
    if argument.kind == "array":
        return Term(f"CAST(coalesce(size({argument.sql}), 0) AS BIGINT)", "int", sure=True)
    cure = "the length of a text; in Spark SQL size(array) is the length of an array"
    demands.demand(argument, ("text", "bytes"), place, f"is the argument of len, which is {cure}")
    return Term(f"CAST(coalesce(octet_length({argument.sql}), 0) AS BIGINT)", "int", sure=True)


def _split(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    text, mark = terms
    demands.demand(text, ("text",), place, "is an argument of split")
    if mark.kind != "text" or not mark.constant:
        raise ZedProblem(
            place, "split takes a separator in quotes, which is not empty; in Spark SQL: split(text, pattern)"
        )
    pattern = re.sub(r"([^A-Za-z0-9])", r"\\\1", mark.constant)
    return Term(f"split({text.sql}, {text_sql(pattern)})", "array", sure=text.sure)


def _replace(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    if terms[1].constant == "":
        raise ZedProblem(place, "replace takes a text to look for, which is not empty")
    return _text("replace({}, {}, {})")(demands, terms, place)


def _join(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    demands.demand(terms[0], ("array",), place, "is the first argument of join")
    mark = terms[1].sql if len(terms) > 1 else "''"
    return Term(f"coalesce(array_join({terms[0].sql}, {mark}, ''), '')", "text", sure=True)


def _coalesce(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    common_term = demands.alike(terms, place, "coalesce")
    sql = f"coalesce({', '.join(term.sql for term in terms)})"
    return Term(sql, common_term.kind, paths=common_term.paths, sure=any(term.sure for term in terms))


def _log(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    number = _number("{}")(demands, terms, place)
    return Term(
        f"ln(CAST(IF({number.sql} > 0, {number.sql}, raise_error('log: illegal argument')) AS DOUBLE))", "float"
    )


_DIRECTIVES = {
    "A": "EEEE",
    "a": "EEE",
    "B": "MMMM",
    "b": "MMM",
    "D": "MM/dd/yy",
    "d": "dd",
    "F": "yyyy-MM-dd",
    "H": "HH",
    "I": "hh",
    "j": "DDD",
    "M": "mm",
    "m": "MM",
    "p": "a",
    "R": "HH:mm",
    "r": "hh:mm:ss a",
    "S": "ss",
    "T": "HH:mm:ss",
    "Y": "yyyy",
    "y": "yy",
    "Z": "UTC",
    "z": "+0000",
    "n": "\n",
    "t": "\t",
    "%": "%",
}
_LITERAL = "Zznt%"


def _strftime(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    form, moment = terms
    demands.demand(moment, ("time",), place, "is the time of strftime (time(…) makes a time of nanoseconds)")
    if form.kind != "text" or form.constant is None:
        raise ZedProblem(place, "strftime takes a format in quotes; in Spark SQL: date_format(time, format)")
    parts: list[tuple[str, bool]] = []
    for match in re.finditer(r"%.?|[^%]+", form.constant, re.DOTALL):
        part = match[0]
        if part.startswith("%") and part[1:] not in _DIRECTIVES:
            directives = " ".join(f"%{name}" for name in _DIRECTIVES)
            raise ZedProblem(place, f"`{part}` is not supported; known here: {directives}")
        known_part = _DIRECTIVES[part[1:]] if part.startswith("%") else part
        is_literal = not part.startswith("%") or part[1:] in _LITERAL
        if is_literal and parts and parts[-1][1]:
            parts[-1] = (parts[-1][0] + known_part, True)
        else:
            parts.append((known_part, is_literal))
    quoted_parts = (
        f"'{quoted_text}'" if is_literal else text
        for text, is_literal in parts
        for quoted_text in [text.replace("'", "''")]
    )
    pattern = "".join(quoted_parts)
    return Term(f"date_format({moment.sql}, {text_sql(pattern)})", "text", sure=moment.sure)


def _bucket(demands: Demands, terms: Sequence[Term], place: ZedPlace) -> Term:
    moment, span = terms
    demands.demand(moment, ("time",), place, "is the time of bucket (time(…) makes a time of nanoseconds)")
    if span.kind != "duration":
        raise ZedProblem(place, "bucket takes a duration, such as 1h; in Spark SQL: date_trunc('hour', time)")
    return Term(f"timestamp_micros(unix_micros({moment.sql}) div {span.sql}L * {span.sql}L)", "time")


_SPACES = text_sql(r"(?U)\A\s+|\s+\z")
_FUNCTIONS: dict[str, tuple[int, int, Callable[[Demands, Sequence[Term], ZedPlace], Term]]] = {
    "lower": (1, 1, _text("lower({})")),
    "upper": (1, 1, _text("upper({})")),
    "trim": (1, 1, _text(f"regexp_replace({{}}, {_SPACES.replace('{', '{{').replace('}', '}}')}, '')")),
    "len": (1, 1, _len),
    "rune_len": (1, 1, _text("CAST(coalesce(char_length({}), 0) AS BIGINT)", "int")),
    "levenshtein": (2, 2, _text("CAST(levenshtein({}, {}) AS BIGINT)", "int")),
    "replace": (3, 3, _replace),
    "split": (2, 2, _split),
    "join": (1, 2, _join),
    "abs": (1, 1, _number("abs({})")),
    "ceil": (1, 1, _rounding("ceil")),
    "floor": (1, 1, _rounding("floor")),
    "round": (1, 1, _number("round({})")),
    "sqrt": (1, 1, _number("sqrt(CAST({} AS DOUBLE))", "float")),
    "pow": (2, 2, _number("pow(CAST({} AS DOUBLE), CAST({} AS DOUBLE))", "float")),
    "log": (1, 1, _log),
    "coalesce": (1, 99, _coalesce),
    "strftime": (2, 2, _strftime),
    "bucket": (2, 2, _bucket),
    "every": (2, 2, _bucket),
}
"""Name → the least and the most arguments, and the function that makes the SQL."""

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9} | {
    "d": 86400 * 10**9,
    "w": 7 * 86400 * 10**9,
    "y": 365 * 86400 * 10**9,
}


def micros(text: str, place: ZedPlace) -> int:
    """A duration literal in microseconds. ZedProblem for one with parts of a microsecond."""
    total = 0
    for number, unit in re.findall(r"([0-9]+(?:\.[0-9]+)?)(ns|us|ms|s|m|h|d|w|y)", text):
        integer_part, _, part = number.partition(".")
        total += int(f"{integer_part}{part}") * _UNITS[unit] // 10 ** len(part)
    if total % 1000 or not 0 < total // 1000 < 2**53:
        raise ZedProblem(place, f"`{text}` must be whole microseconds; Spark's times have no parts of them")
    return total // 1000
