"""The log's rights for Faust: the same properties and the same environment, in its own terms."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import faust

from ...schemas.errors import ConfigError
from ..kafka.options import Options

_KNOWN = frozenset(
    "security.protocol sasl.mechanism sasl.mechanisms sasl.username sasl.password ssl.ca.location "
    "ssl.certificate.location ssl.key.location ssl.key.password "
    "ssl.endpoint.identification.algorithm enable.ssl.certificate.verification".split()
)


def credentials(options: Options) -> faust.SASLCredentials | faust.SSLCredentials | None:
    """From librdkafka's properties. None for a plain connection.

    Raises:
        ConfigError: a way to prove who one is that Faust does not have, such as OAuth.
    """
    given = options.base
    protocol = given.get("security.protocol", "plaintext").lower()
    unknown = [n for n in given if n.startswith(("sasl.", "ssl.")) and n not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"event_log.options.{unknown[0]}: Faust does not have it. Set streams.engine: native."
        )
    context = _context(given) if protocol.endswith("ssl") else None
    if protocol.startswith("sasl"):
        mechanism = given.get("sasl.mechanism") or given.get("sasl.mechanisms") or "PLAIN"
        if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
            raise ConfigError(
                f"event_log.options.sasl.mechanism: {mechanism}; with Faust it is PLAIN, "
                "SCRAM-SHA-256 or SCRAM-SHA-512. Set one, or streams.engine: native."
            )
        return faust.SASLCredentials(
            username=given.get("sasl.username"),
            password=given.get("sasl.password"),
            mechanism=mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context=context) if context is not None else None


def _context(given: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=given.get("ssl.ca.location"))
    if given.get("ssl.endpoint.identification.algorithm", "https") == "none":
        context.check_hostname = False
    if given.get("enable.ssl.certificate.verification", "true") == "false":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate = given.get("ssl.certificate.location")
    if certificate is not None:
        context.load_cert_chain(
            certificate, given.get("ssl.key.location"), given.get("ssl.key.password")
        )
    return context
