"""The webhook's own authority and certificate: valid for the names asked, renewed in time, trusted across a renewal."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from scheduler import pki
from scheduler.pki import Material, renewed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTS = {"vgpu.kube-system.svc", "127.0.0.1"}


def verify(material: Material, trusted: str, at: datetime, host: str = "vgpu.kube-system.svc") -> None:
    """Verifies as a TLS client does; raises VerificationError."""
    store = Store(x509.load_pem_x509_certificates(trusted.encode()))
    verifier = PolicyBuilder().store(store).time(at).build_server_verifier(x509.DNSName(host))
    verifier.verify(x509.load_pem_x509_certificate(material.certificate.encode()), [])


def serial(material: Material) -> int:
    return x509.load_pem_x509_certificate(material.certificate.encode()).serial_number


def test_a_client_that_trusts_the_authority_accepts_the_certificate_for_its_names_only() -> None:
    material = renewed(None, HOSTS, NOW)
    verify(material, material.authorities, NOW)
    verify(material, material.authorities, NOW - timedelta(minutes=5))
    with pytest.raises(VerificationError):
        verify(material, material.authorities, NOW, "other.kube-system.svc")
    with pytest.raises(VerificationError):
        verify(material, renewed(None, HOSTS, NOW).authorities, NOW)
    with pytest.raises(VerificationError):
        verify(material, material.authorities, NOW + pki.SERVING_LIFE + timedelta(minutes=1))


def test_nothing_changes_while_everything_is_good() -> None:
    material = renewed(None, HOSTS, NOW)
    assert renewed(material, HOSTS, NOW) is material
    assert renewed(material, {"127.0.0.1"}, NOW + timedelta(days=59)) is material


def test_the_certificate_is_renewed_before_it_ends_by_the_same_authority() -> None:
    material = renewed(None, HOSTS, NOW)
    later = NOW + timedelta(days=61)
    fresh = renewed(material, HOSTS, later)
    assert fresh.authorities == material.authorities
    assert serial(fresh) != serial(material)
    verify(fresh, material.authorities, later)


def test_a_new_name_gets_a_new_certificate_that_keeps_the_old_names() -> None:
    material = renewed(None, HOSTS, NOW)
    fresh = renewed(material, {"other.kube-system.svc"}, NOW)
    for host in ("other.kube-system.svc", "vgpu.kube-system.svc"):
        verify(fresh, material.authorities, NOW, host)


def test_both_authorities_are_trusted_while_one_takes_over_from_the_other() -> None:
    old = renewed(None, HOSTS, NOW)
    later = NOW + pki.AUTHORITY_LIFE - timedelta(days=300)
    old = renewed(old, HOSTS, NOW + pki.AUTHORITY_LIFE - timedelta(days=370))
    new = renewed(old, HOSTS, later)
    assert new.authority_key != old.authority_key
    verify(old, new.authorities, later)
    verify(new, new.authorities, later)
    assert renewed(new, HOSTS, later) is new
    much_later = later + pki.AUTHORITY_LIFE - timedelta(days=300)
    assert len(x509.load_pem_x509_certificates(renewed(new, HOSTS, much_later).authorities.encode())) == 2


@pytest.mark.parametrize("field", ["authorities", "authority_key", "certificate", "key"])
@pytest.mark.parametrize("value", ["", "rubbish", "other"])
def test_damaged_material_is_replaced(field: str, value: str) -> None:
    material, other = renewed(None, HOSTS, NOW), renewed(None, HOSTS, NOW)
    damaged = msgspec.structs.replace(material, **{field: getattr(other, field) if value == "other" else value})
    fresh = renewed(damaged, HOSTS, NOW)
    if field == "authority_key":  # noticed when it is needed: a certificate of the wrong key is no certificate
        fresh = renewed(fresh, HOSTS, NOW + timedelta(days=61))
        fresh = renewed(fresh, HOSTS, NOW + timedelta(days=61))
        verify(fresh, fresh.authorities, NOW + timedelta(days=61))
        return
    verify(fresh, fresh.authorities, NOW)
