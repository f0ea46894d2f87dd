"""The grammar of Zed: a text as a tree of nodes. Each node knows its place in the text.

The grammar follows Zed 1.14: ``!`` and ``not`` bind closer than ``*``, and a comparison has two sides. Operators and functions
that have no SQL parse too, as far as a useful message needs them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from zync_assets.pipeline_file.zed.nodes import (
    START,
    Binary,
    Choice,
    Constant,
    Elements,
    FunctionCall,
    Index,
    Kind,
    Member,
    Name,
    Node,
    Operator,
    RecordLiteral,
    Spread,
    Type,
    Unary,
    ZedPlace,
    ZedProblem,
)

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

    Part: TypeAlias = "Tree[Token] | Token"

MAX_LENGTH = 20_000
MAX_DEPTH = 30

_CURES = {
    "where": "write the condition into `where:` of the rule, or drop outputs by `shape: {where: …}` of the output",
    "search": "write the condition into `where:` of the rule, in comparisons of fields",
    "over": "a rule of Spark SQL has `explode:`, and transform(array, x -> …) maps an array",
    "explode": "a rule of Spark SQL has `explode:`",
    "summarize": "a rule of type group or view has aggregates",
    "join": "a rule of type denorm or view joins topics",
    "anti": "a rule of type view has LEFT JOIN",
    "inner": "a rule of type denorm or view joins topics",
    "from": "`inputs:` names the topics",
    "file": "`inputs:` names the topics",
    "get": "`inputs:` names the topics",
    "pool": "`inputs:` names the topics",
    "fork": "write a rule for each branch",
    "switch": "write a rule with a `where:` for each case, or `a ? b : c`",
    "const": "write the value in its place",
    "func": "write the expression in its place",
    "op": "write the operators in their place",
    "type": "write the type in its place",
    "assert": "`where:` of the rule chooses records, and Spark SQL has assert_true(…)",
    "fuse": "an output's schema has the fields of all its rules already",
    "shape": "name the fields in a record, each with a cast",
    "load": "`out:` of the rule names the output",
    "output": "`out:` of the rule names the output",
}
_ORDER = "the outputs follow the order of their inputs, one record for each"
_OTHERS = ("sort", "top", "head", "tail", "uniq", "sample", "merge", "debug")

GRAMMAR = r"""
program: PIPE? op (PIPE op)*
?op: PUT assignment ("," assignment)* -> put
   | assignment ("," assignment)*     -> put
   | CUT column ("," column)*         -> cut
   | DROP expr ("," expr)*            -> drop
   | RENAME assignment ("," assignment)* -> rename
   | YIELD expr ("," expr)*           -> yield_
   | PASS                             -> pass_
   | UNSUPPORTED                      -> unsupported
   | expr                             -> bare
assignment: expr ":=" expr
?column: assignment | expr
condition: expr
join: equality (AND equality)*
equality: additive "=" additive

?expr: any_of | any_of "?" expr ":" expr -> choice
?any_of: all_of | any_of OR all_of       -> binary
?all_of: compared | all_of AND compared  -> binary
?compared: additive | additive (COMPARISON | LESS | MORE | IN) additive -> binary
?additive: factor | additive (PLUS | MINUS) factor -> binary
?factor: negated | factor (STAR | SLASH | PERCENT) negated -> binary
?negated: (BANG | NOT) negated -> unary | signed
?signed: MINUS postfix -> unary | postfix
?postfix: primary
   | postfix "." NAME             -> field
   | postfix "[" expr "]"         -> index
   | postfix "[" [expr] ":" [expr] "]" -> slice
?primary: "(" expr ")"
   | NAME                         -> name
   | NAME "(" [expr ("," expr)*] ")" -> call
   | LESS type MORE "(" expr ")"  -> typed_call
   | LESS type MORE               -> type_value
   | NULL "(" (type | LESS type MORE) ")" -> typed_null
   | (NULL | TRUE | FALSE | INT | FLOAT | STRING | TIME | DURATION | BYTES | ADDRESS | FTEXT) -> literal
   | "{" [element ("," element)*] "}" -> record
   | "[" [item ("," item)*] "]"   -> array
   | SET_OPEN [item ("," item)*] "]" PIPE -> set_
   | MAP_OPEN                     -> map_
   | CASE [expr] (WHEN expr THEN expr)+ [ELSE expr] END -> case
?element: NAME -> name_of | (NAME | STRING) ":" expr -> pair | "..." expr -> spread
?item: expr | "..." expr -> spread
type: NAME -> plain_type
   | STRING -> plain_type
   | "{" [type_field ("," type_field)*] "}" -> record_type
   | "[" type "]" -> array_type
   | SET_OPEN type "]" PIPE -> other_type
   | "(" type ("," type)+ ")" -> other_type
type_field: (NAME | STRING) ":" type

PIPE: "|"
SET_OPEN: "|["
MAP_OPEN: /\|\{(.|\n)*/
COMPARISON: "==" | "!=" | "<=" | ">="
LESS: "<"
MORE: ">"
PLUS: "+"
MINUS: "-"
STAR: "*"
SLASH: "/"
PERCENT: "%"
BANG: "!"
PUT.3: /put(?=\s)/
CUT.3: /cut(?=\s)/
DROP.3: /drop(?=\s)/
RENAME.3: /rename(?=\s)/
YIELD.3: /yield(?=\s)/
PASS.3: /pass\b(?!\s*[.:(\[])/
UNSUPPORTED.3: /(@WORDS)\b(?=\s)(?!\s*:=)(.|\n)*/
IN.2: /in\b/
AND.2: /(and|AND)\b/
OR.2: /(or|OR)\b/
NOT.2: /(not|NOT)\b/
NULL.2: /null\b/
TRUE.2: /true\b/
FALSE.2: /false\b/
CASE.2: /case\b/
WHEN.2: /when\b/
THEN.2: /then\b/
ELSE.2: /else\b/
END.2: /end\b/
TIME.6: /[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})/
ADDRESS.5: /[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+(\/[0-9]+)?/
DURATION.4: /([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h|d|w|y))+(?![A-Za-z0-9_])/
BYTES.4: /0x[0-9a-fA-F]*/
FLOAT.3: /[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?/
INT: /[0-9]+/
STRING: /"([^"\\\x00-\x1f]|\\.)*"|'([^'\\\x00-\x1f]|\\.)*'/
FTEXT.3: /f"([^"\\]|\\.)*"|f'([^'\\]|\\.)*'/
NAME: /[^\W\d][\w$]*|\$[\w$]*/
COMMENT: /\/\/[^\n]*/ | /\/\*(.|\n)*?\*\//
%ignore COMMENT
%ignore /[ \t\r\n]+/
""".replace("@WORDS", "|".join((*_CURES, *_OTHERS)))


def parse_program(text: str) -> tuple[Operator, ...]:
    """The operators of a ``zed:``, in their order. The first one may have a pipe before it, as in zync's files."""
    tree = _tree(text, "program")
    return tuple(_operator(part) for part in _trees(tree))


def parse_condition(text: str) -> Node:
    """The node of an expression, such as a ``where:`` has."""
    return _node(_trees(_tree(text, "condition"))[0])


def parse_join(text: str) -> tuple[tuple[Node, Node], ...]:
    """The pairs of a ``join-on:``: equalities with one ``=`` each, as in zync's files."""
    return tuple((_node(part.children[0]), _node(part.children[1])) for part in _trees(_tree(text, "join")))


@lru_cache(maxsize=1)
def _parser() -> Lark:
    # Here: a pipeline file without Zed needs no parser of it.
    from lark import Lark

    starts = ["program", "condition", "join"]
    return Lark(GRAMMAR, parser="lalr", start=starts, propagate_positions=True, maybe_placeholders=True)


def _tree(text: str, start: str) -> Tree[Token]:
    from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

    if len(text) > MAX_LENGTH:
        raise ZedProblem(START, f"is longer than {MAX_LENGTH} characters")
    _check_depth(text)
    try:
        return _parser().parse(text, start=start)
    except UnexpectedToken as error:
        if error.token.type == "$END":
            raise ZedProblem(_end(text), "something is missing at the end") from None
        raise ZedProblem(ZedPlace(error.line, error.column), _refusal(str(error.token))) from None
    except UnexpectedCharacters as error:
        remainder = text[error.pos_in_stream :]
        raise ZedProblem(ZedPlace(error.line, error.column), _refusal(remainder[:1])) from None
    except UnexpectedInput:
        raise ZedProblem(_end(text), "does not parse") from None


_REFUSALS = {
    "~": "is not supported; in Spark SQL: value.name RLIKE 'pattern'",
    "/": "can't stand there; a pattern is text in Spark SQL: value.name RLIKE 'pattern'",
    "=": "can't stand there; write `==` to compare, and `:=` to set a field",
    "==": "can't stand there; a comparison has two sides, and `join-on:` compares by one `=`",
    ";": "is not supported; write each value in its place",
    "&": "is not supported; write `and`",
    "|": "can't stand there; write `or` between conditions, and a `|` before each operator",
    "like": "is not supported; in Spark SQL: value.name LIKE 'pattern%'",
    "is": "can't stand there; write `is(value, <type>)`, or `== null`",
    "not": "can't stand there; write `!(a in b)`",
    "between": "is not supported; write `a >= b and a <= c`",
}


def _refusal(token_text: str) -> str:
    reason = _REFUSALS.get(token_text.lower(), "can't stand there")
    return f"`{token_text[:40]}` {reason}"


def _end(text: str) -> ZedPlace:
    lines = text.rstrip().split("\n")
    return ZedPlace(len(lines), len(lines[-1]) + 1)


_NESTING = re.compile(r"//[^\n]*|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\[{(\]})]")


def _check_depth(text: str) -> None:
    depth = 0
    for match in _NESTING.finditer(text):
        depth += (match[0] in "[{(") - (match[0] in "]})")
        if depth > MAX_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            column = match.start() - (text.rfind("\n", 0, match.start()) + 1) + 1
            raise ZedProblem(ZedPlace(line, column), f"is nested deeper than {MAX_DEPTH} levels")


def _trees(tree: Tree[Token]) -> list[Tree[Token]]:
    from lark import Tree as LarkTree

    return [part for part in tree.children if isinstance(part, LarkTree)]


def _at(part: Part) -> ZedPlace:
    from lark import Token as LarkToken

    if isinstance(part, LarkToken):
        return ZedPlace(part.line or 1, part.column or 1)
    return START if part.meta.empty else ZedPlace(part.meta.line, part.meta.column)


def _operator(tree: Tree[Token]) -> Operator:
    place = _at(tree)
    if tree.data == "unsupported":
        word = str(tree.children[0]).split(maxsplit=1)[0]
        cure = _CURES.get(word, _ORDER)
        raise ZedProblem(place, f"the operator `{word}` is not supported; {cure}")
    pairs: list[tuple[Node | None, Node]] = []
    for part in _trees(tree):
        if part.data == "assignment":
            pairs.append((_node(part.children[0]), _node(part.children[1])))
        else:
            pairs.append((None, _node(part)))
    names = {"put": "put", "cut": "cut", "drop": "drop", "rename": "rename", "yield_": "yield", "pass_": "pass"}
    return Operator(names.get(str(tree.data), "bare"), tuple(pairs), place)  # pyright: ignore[reportArgumentType]


_CONSTANTS: dict[str, Kind] = {
    "NULL": "null",
    "TRUE": "bool",
    "FALSE": "bool",
    "INT": "int",
    "FLOAT": "float",
    "STRING": "text",
    "TIME": "time",
    "DURATION": "duration",
    "BYTES": "bytes",
}


def _node(part: Part | None) -> Node:
    from lark import Token as LarkToken
    from lark import Tree as LarkTree

    assert part is not None and not isinstance(part, LarkToken)
    place, children = _at(part), part.children
    match str(part.data):
        case "literal":
            return _constant(str(children[0]), children[0].type, place)  # pyright: ignore[reportAttributeAccessIssue]
        case "name":
            return Name(str(children[0]), place)
        case "field":
            return Member(_node(children[0]), str(children[1]), _at(children[1]))
        case "index":
            return Index(_node(children[0]), _node(children[1]), place)
        case "call":
            return FunctionCall(str(children[0]), tuple(_node(item) for item in children[1:] if item), place)
        case "typed_call":
            return FunctionCall("cast", (_node(children[3]), _type(children[1])), place)
        case "typed_null":
            type_tree = next(item for item in _trees(part))
            return FunctionCall("cast", (Constant("null", "null", place), _type(type_tree)), place)
        case "type_value":
            return _type(children[1])
        case "unary":
            return _unary(str(children[0]), _node(children[1]), place)
        case "binary":
            operator, right = str(children[1]).lower(), children[2]
            left, at = _node(children[0]), _at(children[1])
            if operator == "in" and isinstance(right, LarkTree) and right.data == "set_":
                return Binary(operator, left, _elements(right), at)
            return Binary(operator, left, _node(right), at)
        case "choice":
            return Choice(((_node(children[0]), _node(children[1])),), _node(children[2]), place)
        case "case":
            return _case(part, place)
        case "record":
            return RecordLiteral(tuple(_element(item) for item in _trees(part)), place)
        case "array":
            return _elements(part)
        case "set_":
            raise ZedProblem(place, "a set is supported after `in`; in Spark SQL: array_distinct(array(…))")
        case "slice":
            cure = "in Spark SQL: substring(text, first, length), or slice(array, first, length)"
            raise ZedProblem(place, f"slices are not supported; {cure}")
        case _:
            raise ZedProblem(place, "maps are not supported; in Spark SQL: map(key, value, …)")


def _elements(part: Tree[Token]) -> Elements:
    return Elements(tuple(_item(item) for item in _trees(part)), _at(part))


def _unary(operator: str, operand: Node, place: ZedPlace) -> Node:
    if operator != "-":
        return Unary("!", operand, place)
    if isinstance(operand, Constant) and operand.kind in ("int", "float") and not operand.text.startswith("-"):
        return Constant(operand.kind, f"-{operand.text}", place)
    return Unary("-", operand, place)


def _case(tree: Tree[Token], place: ZedPlace) -> Node:
    from lark import Token as LarkToken

    nodes: dict[str, list[Node]] = {"CASE": [], "WHEN": [], "THEN": [], "ELSE": []}
    word = ""
    for part in tree.children:
        if isinstance(part, LarkToken):
            word = part.type
        elif part:
            nodes[word].append(_node(part))
    subject = nodes["CASE"]
    tests = [Binary("==", subject[0], test, place) if subject else test for test in nodes["WHEN"]]
    otherwise = nodes["ELSE"][0] if nodes["ELSE"] else Constant("null", "null", place)
    return Choice(tuple(zip(tests, nodes["THEN"], strict=True)), otherwise, place)


def _element(tree: Tree[Token]) -> tuple[str, Node] | Spread:
    first = tree.children[0]
    if tree.data == "spread":
        return Spread(_node(first), _at(tree))
    if tree.data == "name_of":
        return str(first), Name(str(first), _at(tree))
    return _field_name(first), _node(tree.children[1])


def _item(tree: Tree[Token]) -> Node:
    if tree.data == "spread":
        raise ZedProblem(_at(tree), "`...` in an array is not supported; in Spark SQL: concat(array, array)")
    return _node(tree)


def _field_name(part: Part | None) -> str:
    text = str(part)
    return _unquoted(text, _at(part)) if part is not None and text[:1] in ("'", '"') else text


def _type(part: Part | None) -> Type:
    from lark import Token as LarkToken

    assert part is not None and not isinstance(part, LarkToken)
    place = _at(part)
    match str(part.data):
        case "plain_type":
            return Type(_field_name(part.children[0]), (), place)
        case "record_type":
            fields = ((_field_name(item.children[0]), _type(item.children[1])) for item in _trees(part))
            return Type("record", tuple(fields), place)
        case "array_type":
            return Type("array", (("", _type(part.children[0])),), place)
        case _:
            raise ZedProblem(place, "sets and unions have no type in Spark SQL; write an array, or one of the types")


def _constant(text: str, token: str, place: ZedPlace) -> Node:
    if token == "ADDRESS":
        raise ZedProblem(place, f'addresses are not supported; compare texts, such as "{text}"')
    if token == "FTEXT":
        raise ZedProblem(place, 'f-strings are not supported; write "text" + string(value)')
    if token == "STRING":
        return Constant("text", _unquoted(text, place), place)
    return Constant(_CONSTANTS[token], text, place)


_ESCAPE = re.compile(r"\\(u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "'": "'", '"': '"', "\\": "\\"}


def _unquoted(text: str, place: ZedPlace) -> str:
    def replaced(match: re.Match[str]) -> str:
        body = match[1]
        if body in _ESCAPED:
            return _ESCAPED[body]
        number = int(body[1:].strip("{}"), 16) if len(body) > 1 else -1
        if not 0 <= number < 0xD800 and not 0xDFFF < number <= 0x10FFFF:
            raise ZedProblem(place, f"`\\{body}` is no escape of Zed")
        return chr(number)

    return _ESCAPE.sub(replaced, text[1:-1])
