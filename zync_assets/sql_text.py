"""Names, texts and shapes as they stand in Spark SQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zync_assets.pipeline import Shape


def shape_sql(shape: Shape) -> str:
    """A shape as one Spark SQL expression: a mapping becomes a struct, None a null."""
    if shape is None:
        return "NULL"
    if isinstance(shape, str):
        return f"({shape})"
    fields = ", ".join(f"{text_sql(name)}, {shape_sql(part)}" for name, part in shape.items())
    return f"named_struct({fields})"


def leaves(shape: Shape, path: str) -> Iterator[tuple[str, str]]:
    """The expressions of a shape, each with its place: ``value.address.street``."""
    if isinstance(shape, str):
        yield path, shape
    elif shape is not None:
        for name, part in shape.items():
            yield from leaves(part, f"{path}.{name}")


def text_sql(text: str) -> str:
    """A string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def name_sql(name: str) -> str:
    """A column's or field's name, back-quoted."""
    return f"`{name.replace('`', '``')}`"


def dotted(path: Sequence[str]) -> str:
    """A field's path as Spark writes it, ``value.address.street``; names with dots are in back quotes."""
    return ".".join(name_sql(name) if "." in name or "`" in name else name for name in path)
