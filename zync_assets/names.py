"""Names of fields in the lake.

Delta and Parquet forbid some characters in a column's name, and Spark takes names for equal that differ in case alone. Such
a field has another name in the lake: the bytes of a character stand there as ``%`` and two hexadecimal digits, as in a URL.

    first name      first%20name
    Name, name      Name, %6Eame     (the second of two that differ in case alone)
    5%20off         5%2520off        (a % that two hexadecimal digits follow)

Every other name stays as it is. ``original_name`` is the way back.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_FORBIDDEN = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")
_ESCAPED = re.compile(rf"{_FORBIDDEN.pattern}|%(?=[0-9A-Fa-f]{{2}})")
_ENCODED = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def lake_name(name: str, others: Collection[str] = ()) -> str:
    """The name of a field in the lake, beside ``others``: the lake's names of the fields before it in its struct."""
    used = {other.lower() for other in others}
    made = escaped(name)
    cased = [at for at, letter in enumerate(name) if letter.lower() != letter.upper()]
    for count in range(1, len(cased) + 1):
        if made.lower() not in used:
            break
        last = cased[count - 1] + 1
        made = "".join(
            _percent(one) if one == "%" or one.lower() != one.upper() else escaped(one) for one in name[:last]
        )
        made += escaped(name[last:])
    return made


def escaped(name: str) -> str:
    """The name with each forbidden character encoded."""
    return _ESCAPED.sub(lambda found: _percent(found[0]), name)


def has_forbidden(name: str) -> bool:
    """Whether no column of the lake can have the name."""
    return _FORBIDDEN.search(name) is not None


def original_name(name: str) -> str:
    """The name that a field of the lake has in its topic."""
    return _ENCODED.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode(errors="replace"), name)


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode())
