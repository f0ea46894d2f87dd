"""The keys of ``shape``, of inputs and of outputs, and the key ``coalesce`` of outputs."""

from __future__ import annotations

from zync_assets.pipeline_file.key import Key


def input_shape() -> Key:
    """The key ``shape`` of an input."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each record before the record reaches the lake. The lake never gets the rest, except for"
        " quarantined records, which stay whole.",
        "shape: {where: value.op <> 'r', value: value.after}",
        default="none",
        keys=_shape("`kafka`, `key` and `value` of the record"),
    )


def output_shape() -> Key:
    """The key ``shape`` of an output."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each output of the rules before it is numbered. The inputs of a filtered output are *dropped*.",
        "shape: {value: {ID: value.ID}}",
        default="none",
        keys=_shape("`key` and `value` of the output"),
    )


COALESCE = Key(
    "coalesce",
    "true or false",
    "Makes one output of several changes of one key in a batch. A field that the last change leaves out is as an earlier one"
    " has it. The number of outputs depends on where batches are cut.",
    "coalesce: true",
    default="false",
    allowed=("true", "false"),
)


def _shape(roots: str) -> tuple[Key, ...]:
    return (
        Key(
            "where",
            "a condition in Spark SQL",
            f"Keeps the records for which the condition holds; null counts as no. It sees {roots}.",
            "shape: {where: value.ID IS NOT NULL}",
            default="all are kept",
        ),
        Key(
            "key",
            "an expression, or a mapping of names to expressions",
            "The new key.",
            "shape: {key: key}",
            default="the key as it is",
        ),
        Key(
            "value",
            "an expression, or a mapping of names to expressions",
            "The new value. A null value stays null.",
            "shape: {value: {ID: value.ID}}",
            default="the value as it is",
        ),
    )
