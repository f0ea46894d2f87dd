"""Tokens for OAUTHBEARER from a function of the user or of this package: ``oauth_cb: module:function``.

librdkafka fetches tokens itself from a server that accepts client credentials (``sasl.oauthbearer.method: oidc``). For other
servers librdkafka calls a callback, confluent-kafka's ``oauth_cb``. In a pipeline file ``oauth_cb`` is the function's name,
which travels to Spark's executors as text. An executor imports the function, and the function finds its credentials there.
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

    The function is called once now, with ``config`` (``sasl.oauthbearer.config``). Otherwise librdkafka would wait ten seconds
    for a missing token, and not report the cause. Raises SetupError for a missing function, and AuthenticationFailed if the
    function raises.
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
