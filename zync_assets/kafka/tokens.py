"""Tokens for OAUTHBEARER from a function of the user's, or of this package: ``oauth_cb: module:function``.

librdkafka fetches tokens by itself where a server gives them for client credentials (``sasl.oauthbearer.method: oidc``). For
all else it asks a callback, which confluent-kafka calls ``oauth_cb``. Here it is a name, so that it travels to Spark's
executors as text; the function is imported there, with the credentials that it finds there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

from zync_assets.errors import AuthenticationFailed, SetupError, ZyncError

Token: TypeAlias = "tuple[str, float] | tuple[str, float, str, dict[str, str]]"
"""The token and when it ends (seconds since the epoch); then perhaps a principal and SASL extensions (RFC 7628)."""

Callback: TypeAlias = Callable[[str], Token]


def token_callback(name: str, config: str) -> Callback:
    """The function ``module:function`` as a callback for librdkafka.

    It is called once now, with ``config`` (``sasl.oauthbearer.config``): librdkafka would wait ten seconds for a token that
    never comes, and not say why. Raises SetupError if there is no such function, AuthenticationFailed if it raises.
    """
    function = _function(name)
    ready = [_called(function, name, config)]

    def callback(config: str) -> Token:
        try:
            return ready.pop()
        except IndexError:
            return _called(function, name, config)

    return callback


def _function(name: str) -> Callback:
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"oauth_cb is {name}, and there is no such function ({error}); write module:function"
        ) from None
    return found


def _called(function: Callback, name: str, config: str) -> Token:
    try:
        return function(config)
    except ZyncError:
        raise
    except Exception as error:
        # The kind alone: what a stranger's error says may hold what it signed with.
        raise AuthenticationFailed(
            f"oauth_cb {name} made no token ({type(error).__name__}); run it by itself"
        ) from None
