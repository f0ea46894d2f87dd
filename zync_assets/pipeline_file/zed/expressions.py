"""Expressions of Zed as Spark SQL.

Logic is two-valued: a comparison with null is false in Zed, and ``null == null`` is true. Arithmetic takes null as 0, and
concatenation takes it as the empty text. Where the result can't differ, the SQL leaves the treatment of null out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from zync_assets.pipeline_file.zed.functions import cast, function, micros
from zync_assets.pipeline_file.zed.nodes import (
    Binary,
    Choice,
    Constant,
    Elements,
    FunctionCall,
    Index,
    Member,
    Name,
    Node,
    RecordLiteral,
    Spread,
    Type,
    Unary,
    ZedPlace,
    ZedProblem,
)
from zync_assets.pipeline_file.zed.values import (
    AND,
    ATOM,
    COMPARISON,
    DURATIONS,
    FALSE,
    NEGATION,
    NOT,
    NULL,
    NUMBERS,
    OR,
    PRODUCT,
    SUM,
    TRUE,
    ClosedRecord,
    Demands,
    FieldEdit,
    FieldRef,
    OpenRecord,
    Term,
    Value,
    differ,
    element_paths,
    known_type,
    member,
    path_sql,
)
from zync_assets.spark.sql import long_sql, text_sql

_KAFKA = {"topic": "text", "partition": "int", "offset": "int", "timestamp": "time", "time": "time"}


@dataclass
class Compiler:
    """Compiles expressions over ``this``, and collects what they demand of the columns' types."""

    demands: Demands = field(default_factory=Demands)

    def value(self, node: Node, this: Value) -> Value:
        """What an expression stands for."""
        match node:
            case Name(name, place):
                return this if name == "this" else member(this, name, place)
            case Member(base, name, place):
                return member(self.value(base, this), name, place)
            case Index(base, Constant("text", name), place):
                return member(self.value(base, this), name, place)
            case RecordLiteral():
                return self._record(node, this)
            case _:
                return self.term(node, this)

    def term(self, node: Node, this: Value) -> Term:
        """An expression as SQL. ZedProblem for a record whose fields are not known."""
        match node:
            case Constant():
                return _constant(node)
            case Type():
                raise ZedProblem(node.place, "a type is no value; it stands in cast(…), is(…) and typeof(…) == <…>")
            case Index(base, index, place) if not (isinstance(index, Constant) and index.kind == "text"):
                return self._index(self.term(base, this), index, place)
            case Name() | Member() | Index() | RecordLiteral():
                return self.as_term(self.value(node, this), node.place)
            case Elements(items, place):
                return self._array([self.term(item, this) for item in items], place)
            case Unary("-", operand, place):
                operand_term = self.term(operand, this)
                self.demands.demand(operand_term, NUMBERS, place, "is the operand of `-`")
                return Term(
                    f"-{operand_term.within(ATOM)}",
                    operand_term.kind or "number",
                    NEGATION,
                    operand_term.paths,
                    operand_term.sure,
                )
            case Binary("+" | "-" | "*" | "/" | "%", left, right, place):
                return self._arithmetic(node.operator, self.term(left, this), self.term(right, this), place)
            case Choice(cases, otherwise, place):
                return self._choice(cases, otherwise, this, place)
            case FunctionCall():
                return self._call(node, this)
            case _:
                return self.condition(node, this, positive=False)

    def as_term(self, value: Value, place: ZedPlace) -> Term:
        """A value inside an expression."""
        if isinstance(value, Term):
            return value
        if isinstance(value, FieldRef):
            kind = _KAFKA.get(value.path[-1]) if value.path[-2:-1] == ("kafka",) else None
            return Term(path_sql(value.path), kind, paths=() if kind else (value.path,))
        if isinstance(value, OpenRecord):
            cure = "name the fields, or put the record into key or value of `out`"
            raise ZedProblem(place, f"a record with the fields of its topic can't stand in an expression; {cure}")
        parts = {name: self.as_term(part, place) for name, part in value.fields.items()}
        if any(part.kind == "duration" for part in parts.values()):
            raise ZedProblem(place, DURATIONS)
        arguments = (f"{text_sql(name)}, {part.sql}" for name, part in parts.items())
        return Term(f"named_struct({', '.join(arguments)})", "record", sure=True)

    def condition(self, node: Node, this: Value, *, positive: bool) -> Term:
        """A condition that is true or false and never null. ``positive``: null may stand for false."""
        match node:
            case Unary("!", operand):
                operand_term = self.condition(operand, this, positive=False)
                return Term(f"NOT {operand_term.within(NOT)}", "bool", NOT, sure=True)
            case Binary("and" | "or", left, right):
                level = AND if node.operator == "and" else OR
                sides = [self.condition(side, this, positive=positive) for side in (left, right)]
                word = f" {node.operator.upper()} "
                return Term(word.join(side.within(level) for side in sides), "bool", level, sure=not positive)
            case Binary("in", item, container, place):
                return self._in(self.term(item, this), container, this, place, positive)
            case Binary("==" | "!=" | "<" | "<=" | ">" | ">=", left, right, place):
                sides = self._types(left, right, this) or (self.term(left, this), self.term(right, this))
                return self._comparison(node.operator, *sides, place, positive)
            case _:
                condition = self.term(node, this)
                self.demands.demand(condition, ("bool",), node.place, "is a condition")
                if condition.kind == "null":
                    raise ZedProblem(node.place, "null is no condition; write true or false")
                if condition.sure or positive:
                    return condition
                return Term(f"coalesce({condition.sql}, false)", "bool", sure=True)

    def _record(self, node: RecordLiteral, this: Value) -> Value:
        edits: list[FieldEdit] = []
        for at, element in enumerate(node.elements):
            if not isinstance(element, Spread):
                edits.append(FieldEdit("put", element[0], self.value(element[1], this)))
                continue
            record = self.value(element.record, this)
            if isinstance(record, FieldRef):
                edits.append(FieldEdit("keep", value=record))
            elif isinstance(record, ClosedRecord):
                edits += [FieldEdit("put", name, part) for name, part in record.fields.items()]
            elif isinstance(record, OpenRecord) and at == 0:
                edits += record.edits
            else:
                cure = "spread the record first, or name the fields"
                raise ZedProblem(element.place, f"`...` takes a record of the topic here; {cure}")
        if any(edit.kind != "put" for edit in edits):
            return OpenRecord(tuple(edits))
        return ClosedRecord({edit.name: edit.value for edit in edits if edit.value is not None})

    def _index(self, base: Term, index: Node, place: ZedPlace) -> Term:
        if not isinstance(index, Constant) or index.kind != "int":
            cure = "in Spark SQL: element_at(map, key), or get(array, index)"
            raise ZedProblem(place, f"an index must be a number or a name in quotes; {cure}")
        self.demands.demand(base, ("array",), place, "has an index")
        number = int(index.text)
        call = f"get({base.sql}, {number})" if number >= 0 else f"try_element_at({base.sql}, {number})"
        return Term(call, paths=element_paths(base))

    def _array(self, items: Sequence[Term], place: ZedPlace) -> Term:
        self.demands.alike(items, place, "an array")
        sql = f"array({', '.join(item.sql for item in items)})"
        # The parser takes `array() <` and `array(NULL) <` for the beginning of a type.
        has_value = any(item.sql != "NULL" for item in items)
        return Term(sql if has_value else f"({sql})", "array", sure=True)

    def _choice(self, cases: Sequence[tuple[Node, Node]], otherwise: Node, this: Value, place: ZedPlace) -> Term:
        when_terms = [(self.condition(test, this, positive=True), self.term(outcome, this)) for test, outcome in cases]
        default = self.term(otherwise, this)
        results = [*(outcome for _, outcome in when_terms), default]
        kind = self.demands.alike(results, place, "a choice")
        whens = " ".join(f"WHEN {test.sql} THEN {outcome.sql}" for test, outcome in when_terms)
        sure = all(term.sure for term in results)
        return Term(f"CASE {whens} ELSE {default.sql} END", kind.kind, paths=kind.paths, sure=sure)

    def _arithmetic(self, operator: str, left: Term, right: Term, place: ZedPlace) -> Term:
        kinds = (left.kind, right.kind)
        if operator == "+" and "text" in kinds:
            for side in (left, right):
                self.demands.demand(
                    side, ("text",), place, "stands beside a text at `+` (string(…) makes a text of a number)"
                )
            sql = " || ".join(
                side.within(SUM + 1) if side.sure else f"coalesce({side.sql}, '')" for side in (left, right)
            )
            return Term(sql, "text", SUM, sure=True)
        if operator in "+-" and left.kind != "duration" and right.kind == "duration":
            self.demands.demand(left, ("time",), place, "stands beside a duration")
            sql = (
                f"timestamp_micros(unix_micros({left.sql}) {operator} {long_sql(micros(right.constant or '', place))})"
            )
            return Term(sql, "time", sure=left.sure)
        if "duration" in kinds or kinds == ("time", "time"):
            raise ZedProblem(place, DURATIONS)
        for side in (left, right):
            self.demands.demand(side, NUMBERS, place, f"is an operand of `{operator}`")
        if operator == "/":
            return _quotient(left, right, place)
        level = SUM if operator in "+-" else PRODUCT
        left_sql = _operand(left, level)
        right_sql = _operand(right, level + 1)
        kind = "int" if kinds == ("int", "int") else "float" if "float" in kinds else "number"
        return Term(f"{left_sql} {operator} {right_sql}", kind, level, sure=True)

    def _call(self, node: FunctionCall, this: Value) -> Term:
        name, arguments, place = node.name, node.arguments, node.place
        if name == "is" and len(arguments) == 2:
            return self._comparison("==", *self._operand_types(arguments[0], arguments[1], this), place, positive=False)
        if name != "cast" or len(arguments) != 2:
            return function(self.demands, name, [self.term(argument, this) for argument in arguments], place)
        operand, target = arguments
        if isinstance(target, Type):
            return cast(self.demands, self.term(operand, this), target, place)
        if isinstance(target, Constant) and target.kind == "text":
            # A named type has the values of the type that it names.
            return self.term(operand, this)
        if self.term(operand, this).constant != "null":
            cure = "write the type, such as cast(value, <int64>)"
            raise ZedProblem(place, f"Spark SQL can cast nothing but null to the type of another field; {cure}")
        if not isinstance(target, FunctionCall) or target.name != "typeof" or len(target.arguments) != 1:
            raise ZedProblem(place, "the second argument of cast must be a type, such as <int64>, or typeof(field)")
        # The field must be known, and its type is that of the output's other rules.
        self.value(target.arguments[0], this)
        return NULL

    def _operand_types(self, operand: Node, type: Node, this: Value) -> tuple[Term, Term]:
        operand_type, target_type = (
            self.type_name(FunctionCall("typeof", (operand,), operand.place), this),
            self.type_name(type, this),
        )
        if operand_type is None or target_type is None:
            raise ZedProblem(type.place, "the second argument of `is` must be a type, such as <int64>")
        return operand_type, target_type

    def _types(self, left: Node, right: Node, this: Value) -> tuple[Term, Term] | None:
        """The two sides of a comparison of types, as the names that Spark's typeof gives."""
        names = [self.type_name(side, this) for side in (left, right)]
        return None if names[0] is None or names[1] is None else (names[0], names[1])

    def type_name(self, node: Node, this: Value) -> Term | None:
        if isinstance(node, FunctionCall) and node.name == "typeof" and len(node.arguments) == 1:
            return Term(f"typeof({self.term(node.arguments[0], this).sql})", "text", sure=True)
        if not isinstance(node, Type):
            return None
        if node.name in ("record", "array"):
            raise ZedProblem(node.place, "only types of single values can be compared; compare a field's type")
        sql = known_type(node)[1]
        return Term(text_sql(sql.lower()), "text", sure=True, constant=sql)

    def _comparison(self, operator: str, left: Term, right: Term, place: ZedPlace, positive: bool) -> Term:
        nulls = [side for side in (left, right) if side.kind == "null" and side.constant == "null"]
        if nulls:
            operand = right if left is nulls[0] else left
            if operand.constant is not None:
                is_null = operand.constant == "null"
                return TRUE if is_null == (operator in ("==", "<=", ">=")) and operator not in "<>" else FALSE
            if operator in "<>":
                return FALSE
            word = "IS NOT NULL" if operator == "!=" else "IS NULL"
            return Term(f"{operand.within(SUM)} {word}", "bool", COMPARISON, sure=True)
        if "duration" in (left.kind, right.kind):
            raise ZedProblem(place, DURATIONS)
        if differ(left, right):
            # As in Zed: values of two types are never equal, and neither is less.
            return TRUE if operator == "!=" else FALSE
        self.demands.same(left, right, place)
        left_sql, right_sql = left.within(SUM), right.within(SUM)
        literal = left.sure or right.sure
        sure = left.sure and right.sure
        if operator in ("==", "!="):
            is_plain = sure or (positive and literal and operator == "==")
            equal = Term(
                f"{left_sql} {'=' if is_plain else '<=>'} {right_sql}", "bool", COMPARISON, sure=not is_plain or sure
            )
            return equal if operator == "==" else Term(f"NOT {equal.sql}", "bool", NOT, sure=True)
        less = Term(f"{left_sql} {operator} {right_sql}", "bool", COMPARISON, sure=sure)
        if sure or (positive and (literal or operator in "<>")):
            return less
        if literal or operator in "<>":
            return Term(f"coalesce({less.sql}, false)", "bool", sure=True)
        return Term(f"coalesce({less.sql}, {left_sql} IS NULL AND {right_sql} IS NULL)", "bool", sure=True)

    def _in(self, item: Term, container: Node, this: Value, place: ZedPlace, positive: bool) -> Term:
        if not isinstance(container, Elements):
            array = self.term(container, this)
            self.demands.demand(array, ("array",), place, "stands after `in`")
            self.demands.same(item, Term("", paths=element_paths(array)), place)
            sql = f"exists({array.sql}, x -> x <=> {item.within(SUM)})"
            return Term(sql, "bool") if positive else Term(f"coalesce({sql}, false)", "bool", sure=True)
        values = [self.term(value, this) for value in container.items]
        kind = self.demands.alike(values, place, "an array")
        if differ(kind, item):
            return FALSE
        self.demands.same(item, replace(item, kind=kind.kind, paths=kind.paths), place)
        present_values = [value for value in values if value.constant != "null"]
        tests: list[Term] = []
        if present_values and all(value.sure for value in present_values):
            inside = Term(
                f"{item.within(SUM)} IN ({', '.join(value.sql for value in present_values)})", "bool", COMPARISON
            )
            is_plain = item.sure or (positive and len(present_values) == len(values))
            tests.append(inside if is_plain else Term(f"coalesce({inside.sql}, false)", "bool"))
        else:
            tests += [self._comparison("==", item, value, place, positive) for value in present_values]
        if len(present_values) < len(values):
            tests.append(self._comparison("==", item, NULL, place, positive))
        if not tests:
            return FALSE
        level = OR if len(tests) > 1 else tests[0].level
        return Term(" OR ".join(test.within(level) for test in tests), "bool", level, sure=not positive)


def _operand(side: Term, level: int) -> str:
    return side.within(level) if side.sure else f"coalesce({side.sql}, 0Y)"


def _quotient(left: Term, right: Term, place: ZedPlace) -> Term:
    left_sql, right_sql = _operand(left, PRODUCT), _operand(right, PRODUCT + 1)
    if left.kind == right.kind == "int":
        return Term(f"{left_sql} div {right_sql}", "int", PRODUCT, sure=True)
    if "float" in (left.kind, right.kind):
        return Term(f"CAST({left_sql} AS DOUBLE) / {right_sql}", "float", PRODUCT, sure=True)
    cure = "write int64(…) or float64(…) around it"
    raise ZedProblem(
        place, f"`/` divides whole numbers in another way than others, and the type is not plain here; {cure}"
    )


def _constant(node: Constant) -> Term:
    match node.kind:
        case "null":
            return NULL
        case "bool":
            return TRUE if node.text == "true" else FALSE
        case "int":
            number = int(node.text)
            if not -(2**63) <= number < 2**63:
                raise ZedProblem(node.place, f"`{node.text}` is no int64")
            sql = long_sql(number)
        case "float":
            sign = "-" if node.text.startswith("-") else ""
            sql = f"{sign}{_float(node.text.removeprefix('-'))}D"
        case "text":
            sql = text_sql(node.text)
        case "time":
            sql = f"TIMESTAMP '{_time(node)}'"
        case "bytes":
            if len(node.text) % 2:
                raise ZedProblem(node.place, "bytes are pairs of hexadecimal digits")
            sql = f"X'{node.text[2:]}'"
        case "duration":
            return Term(str(micros(node.text, node.place)), "duration", sure=True, constant=node.text)
    level = NEGATION if sql.startswith("-") else ATOM
    return Term(sql, node.kind, level, sure=True, constant=node.text)


def _float(digits: str) -> str:
    mantissa, mark, exponent = digits.lower().partition("e")
    integer_part, _, part = mantissa.partition(".")
    return f"{integer_part or '0'}.{part or '0'}{mark}{exponent}"


def _time(node: Constant) -> str:
    """A time in UTC with six digits of a second."""
    text = re.sub(r"\.([0-9]{1,6})[0-9]*", lambda match: f".{match[1]:<06}", node.text)
    try:
        moment = datetime.fromisoformat(text)
        return (moment - (moment.utcoffset() or timedelta())).replace(tzinfo=None).isoformat(sep=" ") + "Z"
    except (ValueError, OverflowError):
        raise ZedProblem(node.place, f"`{node.text}` is no time") from None
