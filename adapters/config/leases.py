"""Lease policies of namespaces, from RFC-049's section `lease` of RFC-037's namespace files."""

import re
from pathlib import Path

from postroom.adapters.config.document import LeaseNamespaceEntry, LeaseNamespaceFile
from postroom.adapters.config.reader import YamlReader
from postroom.application.cluster.control_plane_metrics import scale_policy
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import LeasePolicy

_DURATION = re.compile(r"([0-9]{1,12})(ms|s|m|h)")
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def load_lease_policies(file: str | Path, default: LeasePolicy) -> dict[str, LeasePolicy]:
    """Return the lease policies of a YAML file by namespace (RFC-049 Lease TTL Configuration).

    Arguments:
        default: policy of a namespace whose section has no TTL.

    Raises: InvalidRequest with file, line and key.
    """
    reader = YamlReader(Path(file))
    policies: dict[str, LeasePolicy] = {}
    for index, entry in enumerate(reader.read(LeaseNamespaceFile).namespaces):
        if entry.name in policies:
            raise reader.refusal(f"namespaces[{index}].name", f"is {entry.name!r} again; rename one")
        policies[entry.name] = _read_policy(reader, entry, f"namespaces[{index}].lease", default)
    return policies


def _read_policy(
    reader: YamlReader, entry: LeaseNamespaceEntry, place: str, default: LeasePolicy
) -> LeasePolicy:
    values = {
        f"{name}_ms": _read_duration(reader, f"{place}.{name}", text)
        for name in ("ttl", "heartbeat_interval", "grace_period")
        if (text := getattr(entry.lease, name)) is not None
    }
    shares = scale_policy(default, values.get("ttl_ms", default.ttl_ms))
    try:
        return LeasePolicy(
            ttl_ms=shares.ttl_ms,
            heartbeat_interval_ms=values.get("heartbeat_interval_ms", shares.heartbeat_interval_ms),
            grace_period_ms=values.get("grace_period_ms", shares.grace_period_ms),
        ).validate()
    except InvalidRequest as error:
        raise reader.refusal(place, f"is inconsistent: {str(error).rstrip('.')}") from error


def _read_duration(reader: YamlReader, place: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise reader.refusal(place, f"is {text!r}; it must be a duration such as 300s")
    return int(match[1]) * _UNITS_MS[match[2]]
