"""Equality search for subjects, and for the encrypted fields of their messages."""

import msgspec

from postroom.application.erasure.protection import Protection
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter
from postroom.domain.subject_policy import ATTRS


def as_stored(filter_: EventFilter, protection: Protection, *, with_names: bool = True) -> EventFilter:
    """Return a filter for messages as they are stored, of one for messages as they were sent.

    The name of a subject becomes its pseudonym, where a policy has subjects in that field; of several
    principals, names remain beside pseudonyms, for messages in the clear. Values of encrypted fields become
    tokens of the first subject that the filter names.

    Arguments:
        with_names: whether names remain beside pseudonyms.

    Raises: Unavailable when the key store can't be used.
    """
    policies = protection.topics.values()
    subject_fields = {each.subject for each in policies}
    values = {f"{ATTRS}{name}": value for name, value in filter_.headers.items()}
    if filter_.correlation_id is not None:
        values["correlation_id"] = filter_.correlation_id
    principals = filter_.principals if "principal" in subject_fields else ()
    names = [*principals, *(value for field, value in values.items() if field in subject_fields)]
    keys = protection.keys.get(names)
    key = next((keys[name] for name in names if name in keys), None)
    if key is None:
        return filter_
    encrypted = {field for each in policies for field in each.encrypt}
    pseudonyms = tuple(keys[name].pseudonym for name in principals if name in keys)
    remaining = tuple(
        name for name in filter_.principals if with_names or name not in principals or name not in keys
    )
    stored = {
        field: keys[value].pseudonym
        if field in subject_fields and value in keys
        else key.token(field, value.encode())
        if field in encrypted
        else value
        for field, value in values.items()
    }
    return msgspec.structs.replace(
        filter_,
        principals=remaining + pseudonyms,
        correlation_id=stored.get("correlation_id"),
        headers={name: stored[f"{ATTRS}{name}"] for name in filter_.headers},
    )


def spec_as_stored(spec: RedriveSpec, protection: Protection) -> RedriveSpec:
    """Return the specification of a redrive job with the criteria of `as_stored`.

    The log records it, so the names of subjects that have a key are left out.

    Raises: Unavailable when the key store can't be used.
    """
    filter_ = as_stored(spec.filter(), protection, with_names=False)
    return msgspec.structs.replace(
        spec,
        principals=filter_.principals,
        correlation_id=filter_.correlation_id,
        headers=dict(filter_.headers),
    )
