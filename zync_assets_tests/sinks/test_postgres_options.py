"""How a connection to PostgreSQL is secured, by its URL and the environment alone."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from zync_assets.errors import SinkError, TargetUnavailable
from zync_assets.sinks.postgres import OPTIONS, PostgresTarget, connect_options
from zync_assets_tests.sinks.conformance import PLACE


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("db.example/shop", {}),
        ("user:password@db.example:5433/shop", {}),
        ("10.1.2.3/shop", {}),
        ("[2001:db8::1]/shop", {}),
        ("/shop?host=db.example", {}),
        ("/shop?host=/run/postgresql,db.example", {}),
        ("/shop?host=localhost:5432&host=db.example:5432", {}),
        ("localhost/shop?hostaddr=10.1.2.3", {}),
        ("/shop", {"PGHOST": "db.example"}),
        ("/shop", {"PGHOSTADDR": "10.1.2.3"}),
        ("localhost.example/shop", {}),
    ],
)
def test_another_host_must_show_a_certificate_for_its_name(url: str, environment: dict[str, str]) -> None:
    options = connect_options(sa.make_url(f"postgresql://{url}"), environment)
    assert options["sslmode"] == "verify-full"
    assert options["sslrootcert"]


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("localhost/shop", {}),
        ("127.0.0.1:5433/shop", {}),
        ("[::1]/shop", {}),
        ("/shop", {}),
        ("/shop?host=/run/postgresql", {}),
        ("/shop?host=localhost:5432", {}),
        ("/shop", {"PGHOST": "/run/postgresql"}),
        ("db.example/shop?sslmode=require", {}),
        ("db.example/shop", {"PGSSLMODE": "disable"}),
        ("/shop?service=warehouse", {}),
        ("/shop", {"PGSERVICE": "warehouse"}),
    ],
)
def test_this_machine_and_a_choice_of_the_user_are_left_alone(url: str, environment: dict[str, str]) -> None:
    options = connect_options(sa.make_url(f"postgresql://{url}"), environment)
    assert options == OPTIONS


def test_the_url_says_which_authority_is_trusted() -> None:
    url = sa.make_url("postgresql://db.example/shop?sslrootcert=ca.pem&connect_timeout=3")
    expected = {name: value for name, value in OPTIONS.items() if name != "connect_timeout"}
    assert connect_options(url, {}) == {**expected, "sslmode": "verify-full"}
    assert "sslrootcert" not in connect_options(sa.make_url("postgresql://db.example"), {"PGSSLROOTCERT": "ca.pem"})


@pytest.mark.parametrize("option", ["sslmode=bogus", "keepalives_idle=abc", "load_balance_hosts=bogus"])
def test_an_option_that_libpq_refuses_is_no_outage(option: str) -> None:
    with pytest.raises(
        SinkError, match=r"invalid .*\. Correct the option in the url, or its variable such as"
    ) as raised:
        PostgresTarget(f"postgresql://u@127.0.0.1:1/d?{option}").progress(PLACE)
    assert not isinstance(raised.value, TargetUnavailable)
