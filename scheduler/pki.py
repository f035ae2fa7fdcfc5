"""A certificate authority of our own and the serving certificate that it signs.

Pure: keys and dates in, PEM out.
"""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE: Final = timedelta(days=5 * 365)
AUTHORITY_MARGIN: Final = timedelta(days=365)  #: a new authority is made when less time is left
SERVING_LIFE: Final = timedelta(days=90)
SERVING_MARGIN: Final = timedelta(days=30)
CLOCK_SKEW: Final = timedelta(minutes=10)  #: clocks of other machines may be behind by this


class Material(msgspec.Struct, frozen=True):
    """Everything in PEM; `authorities` holds the newest CA certificate first, then older ones that are still valid."""

    authorities: str
    authority_key: str
    certificate: str
    key: str


def _key() -> tuple[ec.EllipticCurvePrivateKey, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key, pem.decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: str, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + life)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(now: datetime) -> tuple[str, str]:
    key, pem = _key()
    subject = f"vgpu webhook CA {now:%Y-%m-%d %H:%M:%S}"
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, _name(subject), key.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate), pem


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _serving(authority: str, authority_key: str, hosts: Iterable[str], now: datetime) -> tuple[str, str]:
    issuer = x509.load_pem_x509_certificates(authority.encode())[0]
    signer = serialization.load_pem_private_key(authority_key.encode(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the authority is not an elliptic curve key")
    key, pem = _key()
    life = min(SERVING_LIFE, issuer.not_valid_after_utc - now)
    certificate = (
        _builder("vgpu webhook", issuer.subject, key.public_key(), now, life)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in sorted(hosts)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate), pem


def _hosts_of(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


def _fresh(now: datetime, hosts: Iterable[str], older: Iterable[x509.Certificate] = ()) -> Material:
    authority, authority_key = _authority(now)
    kept = [_pem(each) for each in older if each.not_valid_after_utc > now]
    certificate, key = _serving(authority, authority_key, hosts, now)
    return Material("".join((authority, *kept)), authority_key, certificate, key)


def renewed(material: Material | None, hosts: Iterable[str], now: datetime | None = None) -> Material:
    """`material` itself while it serves all `hosts` for long enough, else its replacement.

    An authority near its end stays in `authorities`: the server can then serve clients that trust the old authority and
    clients that trust the new one. Material that cannot be read is replaced as a whole.
    """
    now = now or datetime.now(UTC)
    wanted = set(hosts)
    if material is None:
        return _fresh(now, wanted)
    try:
        authorities = x509.load_pem_x509_certificates(material.authorities.encode())
        certificate = x509.load_pem_x509_certificate(material.certificate.encode())
        private = serialization.load_pem_private_key(material.key.encode(), None)
        if authorities[0].not_valid_after_utc - now < AUTHORITY_MARGIN:
            return _fresh(now, wanted, authorities)
        current = (
            certificate.not_valid_after_utc - now >= SERVING_MARGIN
            and certificate.not_valid_before_utc <= now
            and wanted <= _hosts_of(certificate)
            and certificate.public_key() == private.public_key()
        )
        certificate.verify_directly_issued_by(authorities[0])
        if current:
            return material
        served = wanted | _hosts_of(certificate)
        certificate_pem, key = _serving(material.authorities, material.authority_key, served, now)
        return Material(material.authorities, material.authority_key, certificate_pem, key)
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound, InvalidSignature, UnsupportedAlgorithm):
        return _fresh(now, wanted)
