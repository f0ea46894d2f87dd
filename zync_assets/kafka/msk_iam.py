"""Tokens for Amazon MSK's IAM access control: ``oauth_cb: zync_assets.kafka.msk_iam:token``.

Signing is AWS's own library's, ``aws-msk-iam-sasl-signer-python`` (``pip install 'zync-assets[msk]'``), with the credentials
that AWS's default chain finds: the environment, a profile, the instance's role.
"""

from __future__ import annotations

import importlib
from typing import Any

from zync_assets.errors import SetupError


def token(config: str) -> tuple[str, float]:
    """A token and when it ends, in seconds since the epoch. ``config``: ``region=…``, as in ``sasl.oauthbearer.config``."""
    pairs = [part.strip().partition("=") for part in config.split(",")]
    region = next((value for name, _, value in pairs if name == "region" and value), None)
    if region is None:
        raise SetupError(
            "MSK's region is missing; set sasl.oauthbearer.config: region=eu-central-1, or where the cluster is"
        )
    try:
        signer: Any = importlib.import_module("aws_msk_iam_sasl_signer")
    except ImportError:
        raise SetupError("MSK's tokens need AWS's signer; install it: pip install 'zync-assets[msk]'") from None
    text, milliseconds = signer.MSKAuthTokenProvider.generate_auth_token(region)
    return text, milliseconds / 1000
