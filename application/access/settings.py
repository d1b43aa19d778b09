"""Settings of access control."""

from collections.abc import Mapping

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.capability.rights import Quota, check_quota

DEFAULT_CACHE_TTL_MS = 30_000
MIN_CACHE_TTL_MS, MAX_CACHE_TTL_MS = 5_000, 120_000
ANY_PRINCIPAL = "*"


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of access control.

    Arguments:
        cap_cache_ttl_ms: how long a verified token is not verified again, and how long a revocation may take
            to be effective in other processes; 5 to 120 s (svc-mailbox I-15, C-6).
        principal_quotas: quota of all capabilities of a principal together, by its name; `*` applies to each
            principal that is not named.
    """

    cap_cache_ttl_ms: int = DEFAULT_CACHE_TTL_MS
    principal_quotas: Mapping[str, Quota] = {}

    def validate(self) -> "AccessSettings":
        """Return the settings, or raise InvalidRequest."""
        check_int("cap_cache_ttl_ms", self.cap_cache_ttl_ms, MIN_CACHE_TTL_MS, MAX_CACHE_TTL_MS)
        for quota in self.principal_quotas.values():
            check_quota(quota)
        return self

    def quota_of(self, principal: str) -> Quota | None:
        """Return the quota of a principal; None if it has none."""
        return self.principal_quotas.get(principal) or self.principal_quotas.get(ANY_PRINCIPAL)
