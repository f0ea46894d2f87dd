"""Spark SQL expressions of a pipeline file, checked without Spark.

An expression sees one record (``kafka``, ``key``, ``value``) or named records (``left``, ``right``, ``in``) with these three
inside. It must be one deterministic expression over these names. Queries, aggregates, windows, functions that make rows, clocks
and random numbers are problems. Only data shows types and fields, so that this module does not check them.

Spark accepts the keywords ``in``, ``left`` and ``right`` as column names, and so does this module. Names are case-insensitive,
as in Spark.

The lists of functions are those of Spark 4.1. They come from Spark's own function registry, by the group that Spark documents
for each function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from zync_assets.pipeline_file.fields import suggestion


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NON_DETERMINISTIC = _words(
    """
    curdate current_catalog current_database current_date current_schema current_time current_timestamp current_timezone
    current_user input_file_block_length input_file_block_start input_file_name java_method localtime localtimestamp
    monotonically_increasing_id now python_worker_logs rand randn random randstr reflect session_user shuffle
    spark_partition_id try_reflect uniform user uuid version
    """
)
"""Their result differs from run to run, from batch to batch, or from session to session."""

WITHOUT_PARENTHESES = _words(
    "current_date current_time current_timestamp current_user localtime localtimestamp session_user user"
)
"""Those that SQL also writes as a bare word."""

NEEDED_ARGUMENTS = {"unix_timestamp": 1, "aes_encrypt": 4}
"""Deterministic from this number of arguments on; without them the time is now, or the initialisation vector random."""

AGGREGATES = _words(
    """
    schema_of_variant_agg any any_value approx_count_distinct approx_percentile approx_top_k approx_top_k_accumulate
    approx_top_k_combine array_agg avg bit_and bit_or bit_xor bitmap_and_agg bitmap_construct_agg
    bitmap_or_agg bool_and bool_or collect_list collect_set corr count count_if count_min_sketch
    covar_pop covar_samp every first first_value grouping grouping_id histogram_numeric hll_sketch_agg
    hll_union_agg kll_merge_agg_bigint kll_merge_agg_double kll_merge_agg_float kll_sketch_agg_bigint
    kll_sketch_agg_double kll_sketch_agg_float kurtosis last last_value listagg max max_by mean median
    min min_by mode percentile percentile_approx percentile_cont percentile_disc regr_avgx regr_avgy
    regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std stddev
    stddev_pop stddev_samp string_agg sum theta_intersection_agg theta_sketch_agg theta_union_agg
    try_avg try_sum var_pop var_samp variance
    """
)

GENERATORS = _words(
    """
    collations explode explode_outer inline inline_outer json_tuple posexplode posexplode_outer
    python_worker_logs range sql_keywords stack variant_explode variant_explode_outer
    """
)

WINDOWS = _words(
    "cume_dist dense_rank lag lead nth_value ntile percent_rank rank row_number session_window window window_time"
)

RECORD_FUNCTIONS = _words(
    """
    abs acos acosh add_months aes_decrypt aes_encrypt aggregate approx_top_k_estimate array array_append
    array_compact array_contains array_distinct array_except array_insert array_intersect array_join
    array_max array_min array_position array_prepend array_remove array_repeat array_size array_sort
    array_union arrays_overlap arrays_zip ascii asin asinh assert_true atan atan2 atanh base64 bigint
    bin binary bit_count bit_get bit_length bitmap_bit_position bitmap_bucket_number bitmap_count
    boolean bround btrim cardinality cast cbrt ceil ceiling char char_length character_length chr
    coalesce collate collation concat concat_ws contains conv convert_timezone cos cosh cot crc32 csc
    date date_add date_diff date_format date_from_unix_date date_part date_sub
    date_trunc dateadd datediff datepart day dayname dayofmonth dayofweek dayofyear decimal decode
    degrees double e element_at elt encode endswith equal_null exists exp expm1 extract factorial filter
    find_in_set flatten float floor forall format_number format_string from_avro from_csv from_json
    from_protobuf from_unixtime from_utc_timestamp from_xml get get_json_object getbit greatest hash hex
    hll_sketch_estimate hll_union hour hypot if ifnull initcap instr int is_valid_utf8 is_variant_null
    isnan isnotnull isnull json_array_length json_object_keys kll_sketch_get_n_bigint
    kll_sketch_get_n_double kll_sketch_get_n_float kll_sketch_get_quantile_bigint
    kll_sketch_get_quantile_double kll_sketch_get_quantile_float kll_sketch_get_rank_bigint
    kll_sketch_get_rank_double kll_sketch_get_rank_float kll_sketch_merge_bigint kll_sketch_merge_double
    kll_sketch_merge_float kll_sketch_to_string_bigint kll_sketch_to_string_double
    kll_sketch_to_string_float last_day lcase least left len length levenshtein ln locate log log10
    log1p log2 lower lpad ltrim luhn_check make_date make_dt_interval make_interval make_time
    make_timestamp make_timestamp_ltz make_timestamp_ntz make_valid_utf8 make_ym_interval map map_concat
    map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys map_values
    map_zip_with mask md5 minute mod month monthname months_between named_struct nanvl negative next_day
    nullif nullifzero nvl nvl2 octet_length overlay parse_json parse_url pi pmod position positive pow
    power printf quarter quote radians raise_error reduce regexp regexp_count regexp_extract
    regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr repeat replace reverse
    right rint rlike round rpad rtrim schema_of_avro schema_of_csv schema_of_json schema_of_variant
    schema_of_xml sec second sentences sequence sha sha1 sha2 shiftleft shiftright shiftrightunsigned
    sign signum sin sinh size slice smallint sort_array soundex space split split_part sqrt st_asbinary
    st_geogfromwkb st_geomfromwkb st_setsrid st_srid startswith str_to_map string struct substr
    substring substring_index tan tanh theta_difference theta_intersection theta_sketch_estimate
    theta_union time time_diff time_trunc timestamp timestamp_micros timestamp_millis timestamp_seconds
    timestampadd timestampdiff tinyint to_avro to_binary to_char to_csv to_date to_json to_number
    to_protobuf to_time to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp
    to_utc_timestamp to_varchar to_variant_object to_xml transform transform_keys transform_values
    translate trim trunc try_add try_aes_decrypt try_cast try_divide try_element_at try_make_interval
    try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_mod try_multiply try_parse_json
    try_parse_url try_subtract try_to_binary try_to_date try_to_number try_to_time try_to_timestamp
    try_url_decode try_validate_utf8 try_variant_get typeof ucase unbase64 unhex unix_date unix_micros
    unix_millis unix_seconds unix_timestamp upper url_decode url_encode validate_utf8 variant_get
    weekday weekofyear width_bucket xpath xpath_boolean xpath_double xpath_float xpath_int
    xpath_long xpath_number xpath_short xpath_string xxhash64 year zeroifnull zip_with
    """
)
"""All the rest, and what Spark's grammar treats as a function."""

ALL = RECORD_FUNCTIONS | AGGREGATES | GENERATORS | WINDOWS | NON_DETERMINISTIC


RECORD_ROOTS = ("kafka", "key", "value")
KAFKA_FIELDS = ("topic", "partition", "offset", "timestamp", "time", "headers")
NO_ROWS: Mapping[str, bool] = {}
MAX_LENGTH = 20_000
MAX_DEPTH = 32
# The parser's time doubles with each struct() in a struct(): it reads the arguments twice.
MAX_STRUCTS = 6

_STRINGS = (TokenType.STRING, TokenType.RAW_STRING)
_TIME_LITERALS = ("date", "timestamp", "timestamp_ltz", "timestamp_ntz")
_TIME_FUNCTIONS = (
    *("cast", "try_cast", "date", "timestamp", "to_date", "try_to_date", "to_timestamp", "try_to_timestamp"),
    *("to_timestamp_ltz", "to_timestamp_ntz"),
)
_CLOCK_WORDS = ("now", "today", "tomorrow", "yesterday")
_PATTERN_WORDS = ("like", "ilike", "rlike", "=", "==", "<>", "!=", "<", ">", "<=", ">=")
# Words before a parenthesis that are no functions: type names and keywords.
_NOT_FUNCTIONS = frozenset(
    # Types first, then words of predicates and of clauses.
    ("character", "dec", "numeric", "char", "varchar", "time", "and", "or", "not", "in", "like", "ilike", "on", "group")
)


@dataclass(frozen=True)
class Scope:
    """What an expression sees beyond the functions of one record: the aggregates that it may use, and the cures for the rest."""

    query: str = "it sees one record only"
    window: str = "it sees one record only"
    window_call: str = "an expression sees one record only"
    generator: str = "a rule makes one output of what it takes"
    clock: str = "use what the record holds, such as kafka.time"
    aggregate: str = "an expression sees one record only"
    aggregates: frozenset[str] = frozenset()
    cures: Mapping[str, str] = field(default_factory=lambda: _ARRAY_CURES)
    """Aggregate → the function to use instead, for an error."""

    def aggregate_cure(self, name: str) -> str:
        return f"{self.aggregate}{f' ({self.cures[name]})' if name in self.cures else ''}"


_ARRAY_CURES = {
    "max": "of an array: array_max or greatest",
    "min": "of an array: array_min or least",
    "sum": "of an array: aggregate",
    "count": "of an array: size",
    "first": "of an array: element_at",
}
RECORD = Scope()
"""One record, or the named records of a rule."""


class SqlProblem(ValueError):
    """A text that is no expression. The message names the place and the reason."""


@dataclass(frozen=True)
class Expression:
    """An expression as text, as tokens and as a syntax tree."""

    sql: str
    tokens: tuple[Token, ...]
    tree: exp.Expr


def tokenize(sql: str) -> list[Token]:
    """The tokens of an expression. Raises SqlProblem, also for a comment and a statement."""
    if len(sql) > MAX_LENGTH:
        raise SqlProblem(f"is longer than {MAX_LENGTH} characters")
    try:
        tokens = Spark().tokenize(sql)
    except TokenError:
        raise SqlProblem("does not parse: a quote or a comment is not closed") from None
    _check_tokens(tokens)
    return tokens


def parse(sql: str, scope: Scope = RECORD) -> Expression:
    """One expression. Raises SqlProblem, also for a query, an alias, a star or a comment."""
    tokens = tokenize(sql)
    try:
        trees = Spark().parser().parse(tokens, sql)
    except ParseError as error:
        raise SqlProblem(_parse_problem(error)) from None
    except RecursionError:
        raise SqlProblem("does not parse: nested too deep") from None
    except (ValueError, TypeError, AttributeError, LookupError):
        # Some malformed texts get past the parser's own checks.
        raise SqlProblem("does not parse") from None
    tree = trees[0] if len(trees) == 1 else None
    if tree is None:
        raise SqlProblem("must be one expression")
    _check_tree(tree, scope)
    return Expression(sql, tuple(tokens), tree)


def check_expression(sql: str, allowed_roots: Sequence[str], rows: Mapping[str, bool] = NO_ROWS) -> list[str]:
    """The problems of an expression that may use only the names ``allowed_roots`` and the rows ``rows``; empty if it has none.

    ``rows``: alias in lower case → whether the alias has the default row, which is no whole record.
    """
    try:
        expression = parse(sql)
    except SqlProblem as problem:
        return [str(problem)]
    problems = list(function_problems(expression.tokens))
    if not problems:
        # A function without parentheses looks like a column; one problem for it is enough.
        problems.extend(_column_problems(expression.tree, allowed_roots, rows))
    return list(dict.fromkeys(problems))


def field_path(sql: str) -> tuple[str, ...] | None:
    """The names of a plain field, such as ``value.source.lsn``; None for another expression."""
    tree = parse(sql).tree.unnest()
    if not isinstance(tree, exp.Column | exp.Dot) or not all(isinstance(part, exp.Identifier) for part in tree.parts):
        return None
    return tuple(part.name for part in tree.parts)


def columns(tree: exp.Expr) -> Iterator[tuple[str, ...]]:
    """The columns that a tree names, as their parts, up to four; variables of lambda functions are left out.

    ``value['n']`` names ``value.n``.
    """
    for column in tree.find_all(exp.Column):
        parts = tuple(part.name for part in column.parts)
        if len(parts) == 1 and isinstance(column.parent, exp.Bracket) and column.arg_key == "this":
            parts += tuple(item.name for item in column.parent.expressions if item.is_string)
        lambda_names = {
            variable.name.lower()
            for parent in _parents(column)
            if isinstance(parent, exp.Lambda)
            for variable in parent.expressions
        }
        if parts and parts[0].lower() not in lambda_names:
            yield parts


def roots(tree: exp.Expr) -> frozenset[str]:
    """The first parts of all columns, in lower case."""
    return frozenset(parts[0].lower() for parts in columns(tree))


def _parents(node: exp.Expr) -> Iterator[exp.Expr]:
    parent = node.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def _check_tokens(tokens: Sequence[Token]) -> None:
    if not tokens:
        raise SqlProblem("is empty")
    for index, token in enumerate(tokens):
        if token.comments or token.token_type == TokenType.HINT:
            raise SqlProblem("holds a comment; write it after # outside the expression")
        if token.token_type == TokenType.SEMICOLON:
            raise SqlProblem("must be one expression without `;`")
        if token.token_type in (TokenType.PLACEHOLDER, TokenType.PARAMETER):
            raise SqlProblem(f"holds the parameter marker `{token.text}`, which nothing can fill")
        if token.token_type in _STRINGS and token.text.strip().lower().startswith(_CLOCK_WORDS):
            previous_text, function = (tokens[at].text if at >= 0 else "" for at in (index - 1, index - 2))
            next_type = tokens[index + 1].token_type if index + 1 < len(tokens) else None
            if previous_text.lower() in _TIME_LITERALS:
                raise SqlProblem(_not_deterministic(f"{previous_text} '{token.text}'"))
            if next_type == TokenType.DCOLON or (previous_text == "(" and function.lower() in _TIME_FUNCTIONS):
                raise SqlProblem(_not_deterministic(f"'{token.text}' as a time"))
    _check_depth(tokens)
    first_token = tokens[0]
    is_call = len(tokens) > 1 and tokens[1].token_type == TokenType.L_PAREN
    if first_token.token_type in _STATEMENTS and not is_call:
        raise SqlProblem(f"must be an expression, not a statement (`{first_token.text}`)")


def _check_depth(tokens: Sequence[Token]) -> None:
    struct_flags: list[bool] = []
    for index, token in enumerate(tokens):
        if token.token_type in (TokenType.L_PAREN, TokenType.L_BRACKET):
            struct_flags.append(index > 0 and tokens[index - 1].text.lower() == "struct")
        elif token.token_type in (TokenType.R_PAREN, TokenType.R_BRACKET) and struct_flags:
            struct_flags.pop()
        if len(struct_flags) > MAX_DEPTH or sum(struct_flags) > MAX_STRUCTS:
            raise SqlProblem("is nested too deep; write fields as a mapping, and nest that")


_STATEMENTS = frozenset(
    {
        TokenType.COMMAND,
        TokenType.SHOW,
        TokenType.SELECT,
        TokenType.WITH,
        TokenType.FROM,
        *Spark.Parser.STATEMENT_PARSERS,
    }
)

_FORBIDDEN: tuple[tuple[type[exp.Expr], str], ...] = (
    (exp.Query, "must not hold a query; {query}"),
    (exp.Window, "must not hold a window function; {window}"),
    (exp.Star, "must not hold `*`; name the fields"),
    (exp.Placeholder, "must not hold a parameter marker"),
    (exp.Parameter, "must not hold a parameter marker"),
    (exp.Command, "must be an expression, not a statement"),
)


def _check_tree(tree: exp.Expr, scope: Scope) -> None:
    if isinstance(tree, exp.Alias | exp.Aliases):
        raise SqlProblem("must not have an alias; the name is the mapping's key")
    for node in tree.walk():
        for forbidden, message in _FORBIDDEN:
            if isinstance(node, forbidden) and not (isinstance(node, exp.Star) and isinstance(node.parent, exp.Count)):
                raise SqlProblem(message.format(query=scope.query, window=scope.window))
    # Aggregates with their clauses pass here: they are refused by name, which makes the better message.
    if not isinstance(tree, exp.Condition | exp.Interval | exp.Tuple | exp.Filter | exp.WithinGroup | exp.IgnoreNulls):
        raise SqlProblem("must be one expression, not a statement or a list")


def function_problems(tokens: Sequence[Token], scope: Scope = RECORD) -> Iterator[str]:
    """The functions that an expression may not call, each with its cure."""
    for index, token in enumerate(tokens):
        is_quoted = token.token_type == TokenType.IDENTIFIER
        name = token.text.lower()
        left_token = tokens[index - 1] if index else None
        right_token = tokens[index + 1] if index + 1 < len(tokens) else None
        if left_token is not None and left_token.token_type == TokenType.DOT:
            continue
        if right_token is None or right_token.token_type != TokenType.L_PAREN:
            is_field = right_token is not None and right_token.token_type == TokenType.DOT
            if name in WITHOUT_PARENTHESES and not is_quoted and not is_field and token.token_type not in _STRINGS:
                yield _not_deterministic(name, scope)
            continue
        if token.token_type in _STRINGS or (
            left_token is not None and left_token.text.lower() in _PATTERN_WORDS and name in ("any", "some", "all")
        ):
            continue
        if name in NON_DETERMINISTIC:
            yield _not_deterministic(f"{name}()", scope)
        elif name in NEEDED_ARGUMENTS:
            if _arguments(tokens, index + 1) < NEEDED_ARGUMENTS[name]:
                minimum = NEEDED_ARGUMENTS[name]
                yield f"`{name}()` is not deterministic with fewer than {minimum} argument{'s' * (minimum > 1)}"
        elif name in AGGREGATES:
            if name not in scope.aggregates:
                yield f"`{name}()` is an aggregate; {scope.aggregate_cure(name)}"
        elif name in GENERATORS:
            yield f"`{name}()` makes rows; {scope.generator}"
        elif name in WINDOWS:
            yield f"`{name}()` is a window function; {scope.window_call}"
        elif (token.token_type == TokenType.VAR or is_quoted) and name not in ALL and name not in _NOT_FUNCTIONS:
            yield f"Spark has no function `{name}`{suggestion(name, RECORD_FUNCTIONS)}"


def _not_deterministic(name: str, scope: Scope = RECORD) -> str:
    return f"`{name}` is not deterministic; {scope.clock}"


def _arguments(tokens: Sequence[Token], opening: int) -> int:
    """The number of arguments of the call whose parenthesis opens there."""
    depth, commas = 0, 0
    for index in range(opening, len(tokens)):
        kind = tokens[index].token_type
        if kind in (TokenType.L_PAREN, TokenType.L_BRACKET):
            depth += 1
        elif kind in (TokenType.R_PAREN, TokenType.R_BRACKET):
            depth -= 1
            if depth == 0:
                return 0 if index == opening + 1 else commas + 1
        elif kind == TokenType.COMMA and depth == 1:
            commas += 1
    return commas + 1


def row_problems(parts: Sequence[str], is_default: bool) -> Iterator[str]:
    """The problem of a column of a row that is written like a field of a record. ``is_default``: the row is no whole record."""
    if is_default and len(parts) > 2 and [part.lower() for part in parts[1:3]] == ["value", "after"]:
        path = ".".join([parts[0], *parts[3:]])
        yield f"`{'.'.join(parts)}` is not known; `{parts[0]}` is a row of the table already: write `{path}`"


def _column_problems(tree: exp.Expr, root_names: Sequence[str], rows: Mapping[str, bool]) -> Iterator[str]:
    for parts in columns(tree):
        name, root = ".".join(parts), parts[0].lower()
        if root in rows:
            yield from row_problems(parts, rows[root])
            continue
        if root not in root_names:
            yield f"`{name}` is not known here; {_cure(name, root, parts, root_names, rows)}"
            continue
        record = parts if root in RECORD_ROOTS else parts[1:]
        if record and record[0].lower() not in RECORD_ROOTS:
            fields = ", ".join(f"{root}.{part}" for part in RECORD_ROOTS)
            yield f"`{name}` is not known; a record has {fields}{suggestion(record[0], RECORD_ROOTS)}"
        elif len(record) > 1 and record[0].lower() == "kafka" and record[1].lower() not in KAFKA_FIELDS:
            yield f"`{name}` is not known; kafka has {', '.join(KAFKA_FIELDS)}{suggestion(record[1], KAFKA_FIELDS)}"


def _cure(name: str, root: str, parts: Sequence[str], root_names: Sequence[str], rows: Iterable[str]) -> str:
    if root in RECORD_ROOTS:
        return f"write {' or '.join(f'`{side}.{name}`' for side in root_names)}"
    if root in ("in", "left", "right"):
        if "value" in root_names:
            path = ".".join(parts[1:])
            return f"write `{path}`" if path else "`where` sees kafka, key and value of one record"
        return f"write {' or '.join(f'`{side}`' for side in root_names)} in place of `{root}`"
    names = root_names if "value" in root_names else [f"{side}.{part}" for side in root_names for part in RECORD_ROOTS]
    quotes = f" (text is written '{name}')" if len(parts) == 1 else ""
    return f"known here: {', '.join([*names, *rows])}{quotes}{suggestion(root, [*root_names, *rows])}"


def _parse_problem(error: ParseError) -> str:
    first_error = error.errors[0] if error.errors else {}
    description, highlight = str(first_error.get("description", "")), str(first_error.get("highlight", ""))
    line, column = int(first_error.get("line") or 1), int(first_error.get("col") or 0)
    place = f"at character {max(column - len(highlight) + 1, 1)}" + (f" of its line {line}" if line > 1 else "")
    if description.startswith("Required keyword"):
        return f"does not parse: something is missing next to `{highlight}` {place}"
    if description.startswith("Expecting "):
        return f"does not parse: `{description.removeprefix('Expecting ')}` is missing after `{highlight}` {place}"
    if description.startswith("Expected TYPE"):
        return f"does not parse: `{highlight}` {place} is no type of Spark SQL"
    return f"does not parse: `{highlight}` {place} can't stand there"
