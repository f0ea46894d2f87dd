"""Certificates of a test's own: authorities, servers for some hosts, clients. PEM files, as librdkafka and Kafka read them."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as files; ``both`` has the key and then the certificate, as Kafka's PEM keystore is."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """A certificate authority; its own certificate is in the file ``path``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        own = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def server(self, name: str, *hosts: str) -> Issued:
        """A certificate for these DNS names, and for the addresses 127.x.x.x among them."""
        names = [
            x509.IPAddress(ipaddress.ip_address(host)) if host.startswith("127.") else x509.DNSName(host)
            for host in hosts
        ]
        return self._issue(name, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, name: str) -> Issued:
        return self._issue(name, ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def _issue(self, name: str, purpose: x509.ObjectIdentifier, hosts: list[x509.GeneralName]) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(name), self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files = Issued(*(self._folder / f"{name}-{part}.pem" for part in ("certificate", "key", "both")))
        files.certificate.write_bytes(certificate)
        files.key.write_bytes(secret)
        files.both.write_bytes(secret + certificate)
        return files


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
