"""Checks the webhook's certificate against what the API server trusts. Pure."""

from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from vgpu.doctor.findings import Finding, ok, wrong

#: The scheduler and cert-manager renew a certificate with a third of its life left. With less than this part left, the
#: renewal has failed
LATE: Final = 1 / 5
_AREA: Final = "certificate"
_REMEDY: Final = "check the scheduler's log; with cert-manager, check its Certificate"


def judge(bundle: bytes, served: bytes | None, service: str, now: datetime, *, refused: str) -> Finding:
    """Judges the certificate.

    `bundle`: caBundle, `served`: the Secret's certificate, both PEM; `refused`: why the Secret's certificate is
    unknown.
    """
    if not bundle:
        return wrong(_AREA, "caBundle of the webhook is empty: the API server trusts no certificate", _REMEDY)
    try:
        trusted = x509.load_pem_x509_certificates(bundle)
    except ValueError as error:
        return wrong(_AREA, f"caBundle of the webhook contains no certificates: {error}", _REMEDY)
    valid = [each for each in trusted if each.not_valid_before_utc <= now < each.not_valid_after_utc]
    if not valid:
        return wrong(_AREA, f"every authority in caBundle has expired, the last on {_day(trusted)}", _REMEDY)
    if served is None:
        return ok(_AREA, f"trusted until {_day(valid)}; cannot check the certificate itself: {refused}")
    try:
        leaf = x509.load_pem_x509_certificates(served)[0]
    except (ValueError, IndexError) as error:
        return wrong(_AREA, f"the Secret of the webhook contains no certificate: {error}", _REMEDY)
    if now >= leaf.not_valid_after_utc:
        return wrong(_AREA, f"the certificate expired on {_day([leaf])}", _REMEDY)
    if not any(_signed(leaf, authority) for authority in valid):
        return wrong(_AREA, "no authority in caBundle has signed the certificate", _REMEDY)
    namespace, _, name = service.partition("/")
    host = f"{name}.{namespace}.svc"
    if service and host not in _hosts(leaf):
        return wrong(_AREA, f"the certificate is for {', '.join(sorted(_hosts(leaf)))}, not for {host}", _REMEDY)
    if leaf.not_valid_after_utc - now < (leaf.not_valid_after_utc - leaf.not_valid_before_utc) * LATE:
        return wrong(
            _AREA,
            f"the certificate expires on {_day([leaf])}; the scheduler or cert-manager has not renewed it",
            _REMEDY,
        )
    return ok(_AREA, f"valid until {_day([leaf])}, trusted until {_day(valid)}")


def _day(certificates: list[x509.Certificate]) -> str:
    return f"{max(each.not_valid_after_utc for each in certificates):%Y-%m-%d}"


def _signed(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _hosts(leaf: x509.Certificate) -> set[str]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return set(found.get_values_for_type(x509.DNSName))
