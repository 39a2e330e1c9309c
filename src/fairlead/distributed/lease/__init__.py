"""Leader election by a lease: of several standby dispatchers, one at a time works, with an epoch of its own.

The record of the lease is in Redis or in the Kubernetes API. A store only has to replace the record
atomically if it is unchanged. It needs no clock: a standby takes over a record that it has seen unchanged for
as long as the lease lasts, on its own clock, as client-go does.
"""

from fairlead.distributed.lease.factory import make_lease
from fairlead.distributed.lease.lease import Lease, LeaseLost, LocalLease, StoredLease
from fairlead.distributed.lease.term import Term

__all__ = ["Lease", "LeaseLost", "LocalLease", "StoredLease", "Term", "make_lease"]
