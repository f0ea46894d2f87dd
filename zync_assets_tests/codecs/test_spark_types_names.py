"""The lake's names of fields, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.codecs.spark_types import lake_name, original_name

ODD = st.text(alphabet="Ab %2Cc,;{}()=\t\n.`äÄßİ", max_size=6)


@pytest.mark.parametrize("name", ["a", "a.b", "ü", "50%", "a`b", "Ünïcode-€", "_x0020_"])
def test_a_name_that_the_lake_can_hold_stays(name: str) -> None:
    assert lake_name(name) == name


def test_names_are_encoded_as_in_a_url() -> None:
    assert lake_name("first name") == "first%20name"
    assert lake_name("a,;{}()=\t\nb") == "a%2C%3B%7B%7D%28%29%3D%09%0Ab"
    assert lake_name("5%20off") == "5%2520off"
    assert lake_name("name", ["Name"]) == "%6Eame"


@given(st.lists(ODD, max_size=8, unique=True))
def test_each_name_has_one_of_its_own_and_comes_back(names: list[str]) -> None:
    made: list[str] = []
    for name in names:
        made.append(lake_name(name, made))
    assert [original_name(name) for name in made] == names
    assert len({name.lower() for name in made}) == len(names)
    assert not any(letter in name for name in made for letter in " ,;{}()=\t\n")
