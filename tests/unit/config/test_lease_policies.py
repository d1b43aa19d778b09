"""Lease policies in namespace files."""

from pathlib import Path

import pytest

from postroom.adapters.config.namespaces import load_lease_policies
from postroom.application.cluster.control_plane_metrics import LeasePolicies
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import LeasePolicy

RFC_049 = """
namespaces:
- name: $admin
  pattern: mailbox
  partition_strategy: consistent_hash # From RFC-048
  assigned_partition: 42 # Computed from mailbox_id
  assigned_proxy: proxy-01 # Owns partition 42
  lease:
    ttl: 300s # 5 minutes
    heartbeat_interval: 60s # 1 minute
    grace_period: 60s # 1 minute after TTL
- name: short
  pattern: mailbox
  lease: {ttl: 1m}
- name: plain
  pattern: mailbox
"""


def load(folder: Path, text: str) -> dict[str, LeasePolicy]:
    file = folder / "ns.yaml"
    file.write_text(text)
    return load_lease_policies(file, LeasePolicy())


def test_rfc_049s_example_loads_and_missing_durations_have_their_share_of_the_ttl(tmp_path) -> None:
    policies = load(tmp_path, RFC_049)
    assert policies == {
        "$admin": LeasePolicy(ttl_ms=300_000, heartbeat_interval_ms=60_000, grace_period_ms=60_000),
        "short": LeasePolicy(ttl_ms=60_000, heartbeat_interval_ms=12_000, grace_period_ms=12_000),
        "plain": LeasePolicy(),
    }


@pytest.mark.parametrize(
    ("lease", "problem"),
    [
        ("{ttl: 300}", "is 300; it must be text"),
        ("{ttl: forever}", "must be a duration such as 300s"),
        ("{ttl: -5s}", "must be a duration"),
        ("{ttl: 1500ms}", "multiple of 1000"),
        ("{ttl: 0s}", "ttl_ms must be at least 1000"),
        ("{ttl: 10s, heartbeat_interval: 6s}", "at most half of ttl_ms"),
        ("{ttl: 100s, grace_period: 4s}", "at least a twentieth"),
        ("{ttl: 999999999999h}", "at most"),
        ("{tll: 10s}", "did you mean ttl"),
        ("5s", "must be a mapping"),
    ],
)
def test_a_policy_that_is_malformed_is_refused_with_its_line(tmp_path, lease: str, problem: str) -> None:
    text = f"namespaces:\n- name: a\n  pattern: mailbox\n  lease: {lease}\n"
    with pytest.raises(InvalidRequest, match="line 4") as refused:
        load(tmp_path, text)
    assert problem in str(refused.value)


def test_a_namespace_that_is_named_twice_is_refused(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match="again; rename one"):
        load(tmp_path, "namespaces:\n" + "- {name: a, pattern: mailbox}\n" * 2)


def test_the_policy_is_that_of_the_mailboxs_namespace() -> None:
    policies = LeasePolicies(LeasePolicy(), {"a": LeasePolicy(ttl_ms=120_000)})
    assert [policies.get(name).ttl_ms for name in ("a@p", "b@p")] == [120_000, 300_000]
