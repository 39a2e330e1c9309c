"""Deliberate mistakes in the protocol, each with the frames and the faults that reveal it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_SERVER = "fairlead.distributed.frontends.server:FrontServer"
_CLIENT = "fairlead.distributed.frontends.client"
_QUOTAS = "fairlead.distributed.frontends.shared_quotas"
_COUNTS = "fairlead.distributed.supervisor.shared_counts"

ANY = ("ask|answered", "handled", "delay front 1")  # any run reveals it

SUPERVISED = {"has_lease": False, "checks_term": True}
LEASE = {"has_lease": True, "checks_term": True}
CARELESS = {"has_lease": True, "checks_term": False, "notices_after_s": 1.0}


class ProtocolMutant(NamedTuple):
    """`old` is replaced by `new` in the function; `conditions` and `changes` are for `directed`."""

    function: str
    old: str
    new: str
    conditions: list[tuple[str, str, str]]
    changes: Mapping[str, Any] = MappingProxyType({})


MUTANTS = {
    "grants_before_all_fronts_have_declared": ProtocolMutant(
        f"{_SERVER}.run",
        "await self._all_declared.wait()",
        "pass",
        [("first", "sent", "kill dispatcher 1")],
        SUPERVISED,
    ),
    "keeps_jobs_that_are_not_declared": ProtocolMutant(
        f"{_SERVER}._end_declaration",
        "self._end(job)",
        "pass",
        [("end", "sent", "cut dispatcher 1")],
    ),
    "compares_no_jobs_with_the_declared_ones": ProtocolMutant(
        f"{_SERVER}.serve",
        "= set(front.jobs), False",
        "= set(), False",
        [("end", "sent", "cut dispatcher 1")],
    ),
    "does_not_report_again": ProtocolMutant(
        f"{_SERVER}._declare",
        "        job.report_again()",
        "        pass",
        [("granted", "sent|arrives", "cut dispatcher 1")],
    ),
    "restores_no_seats": ProtocolMutant(
        f"{_SERVER}._declare",
        "if declared.seat is None:\n",
        "if True:\n",
        [("submit to engine|first", "handled|sent", "kill dispatcher 1")],
        SUPERVISED,
    ),
    "loses_a_requeue": ProtocolMutant(
        f"{_SERVER}._declare",
        "self._requeue(job, SeatLoss())",
        "pass",
        [("requeue", "sent|arrives", "cut dispatcher 1")],
    ),
    "requeues_twice_after_the_grace_time": ProtocolMutant(
        f"{_SERVER}._requeue",
        "self._early_requeues[job] = requeue",
        "self._early_requeues[FrontJob(job.front, job.number, job.ticket)] = requeue",
        [
            ("first", "sent", "kill dispatcher 1"),
            ("declared", "handled", "kill engine 1"),
            ("requeue", "handled", "cut dispatcher 1"),
        ],
    ),
    "keeps_seats_of_a_front_that_has_ended": ProtocolMutant(
        f"{_SERVER}.end_front",
        "        self._end(job)",
        "        job.front.jobs.pop(job.number)",
        [("submit to engine", "handled", "kill front 1")],
    ),
    "never_gives_up_a_front": ProtocolMutant(
        f"{_SERVER}._wait_for",
        "front.connections == connections and",
        "False and",
        [("submit to engine", "handled", "kill front unreported 1")],
    ),
    "gives_up_a_front_that_has_come_back_and_gone": ProtocolMutant(
        f"{_SERVER}._wait_for",
        "front.connections == connections and",
        "front.link is None and",
        [("first|submit to engine", "sent", "block front 8"), ("welcome", "handled", "block front 8")],
    ),
    "ends_jobs_with_the_connection": ProtocolMutant(
        f"{_SERVER}._wait_for",
        "await trio.sleep(AWAY_S)",
        "await trio.sleep(0)",
        [("submit to engine|first", "handled|sent", "block front 2.5")],
    ),
    "submits_in_any_order_after_the_grace_time": ProtocolMutant(
        f"{_SERVER}._end_grace",
        "key=lambda entry: entry[1]",
        "key=lambda entry: -entry[1]",
        [("queued", "handled", "kill dispatcher 1")],
    ),
    "never_ends_a_job": ProtocolMutant(
        f"{_SERVER}._change",
        "            self._end(job)",
        "            pass",
        [ANY],
    ),
    "declares_no_times_of_arrival": ProtocolMutant(
        f"{_CLIENT}:DispatchClient._declare",
        "age_s = now - job.arrived_at",
        "age_s = 0.0",
        [("queued", "handled", "kill dispatcher 1")],
    ),
    "declares_no_jobs": ProtocolMutant(
        f"{_CLIENT}:DispatchClient._declare",
        "for job in self._jobs.values():",
        "for job in ():",
        [("submit to engine|first", "handled|sent", "kill dispatcher 1")],
    ),
    "follows_a_lower_epoch": ProtocolMutant(
        f"{_CLIENT}:DispatchClient._welcome",
        "if epoch < self.epoch or (epoch == self.epoch and run != self.run_id):",
        "if False:",
        [("granted|first", "handled", "stop dispatcher 2.5"), ("welcome", "handled", "cut dispatcher 1")],
        CARELESS,
    ),
    "raises_its_epoch_although_it_was_replaced": ProtocolMutant(
        f"{_SERVER}._learn_epoch",
        "if not self._raise_epoch(seen + 1):",
        "if False:",
        [("granted|first", "handled", "stop dispatcher 2.5"), ("welcome", "handled", "cut dispatcher 1")],
        CARELESS,
    ),
    "sends_although_it_does_not_lead": ProtocolMutant(
        "fairlead.base.frame_link:FrameLink._write_once",
        "if not self._may_send():",
        "if False:",
        [("granted|first", "handled", "stop dispatcher 2.5")],
        LEASE | {"notices_after_s": 1.0},
    ),
    "accepts_a_grant_of_a_lower_epoch": ProtocolMutant(
        "fairlead.engine.worker.grants:Grants.take",
        "grant.epoch < self._epoch",
        "False",
        [
            ("granted", "sent", "stop front 2.5"),
            ("heartbeat|progress|ask|submit|end|over", "sent", "kill dispatcher 1"),
        ],
        SUPERVISED,
    ),
    "accepts_a_grant_of_an_earlier_run": ProtocolMutant(
        "fairlead.engine.worker.grants:Grants.take",
        "grant.number < self._first.number",
        "False",
        [("granted", "sent", "stop front 2.5"), ("first|end|over|submit", "sent", "kill engine 1")],
        SUPERVISED,
    ),
    "keeps_grants": ProtocolMutant(
        "fairlead.engine.worker.grants:Grants.release",
        "self._sequences[grant] -= 1",
        "pass",
        [ANY],
    ),
    "ends_a_charge_twice": ProtocolMutant(
        f"{_QUOTAS}:SharedQuotas.end",
        ".pop(number, None)",
        ".get(number)",
        [("end", "handled", "cut dispatcher 1")],
    ),
    "keeps_charges_of_a_front_that_has_ended": ProtocolMutant(
        f"{_QUOTAS}:SharedQuotas.end_front",
        "charge.end()",
        "pass",
        [("submit to engine", "handled", "kill front 1")],
    ),
    "charges_again_when_asked_again": ProtocolMutant(
        f"{_QUOTAS}:SharedQuotas.declare",
        " | set(msgspec.convert(asking, list[int]))",
        "",
        [("answered", "sent|arrives", "cut dispatcher 1")],
    ),
    "declares_no_charges": ProtocolMutant(
        f"{_QUOTAS}:RemoteQuotas._declare",
        "list(running), self._ended",
        "[], self._ended",
        [("submit|granted|first", "handled|sent", "cut dispatcher 1")],
    ),
    "adds_counts_twice": ProtocolMutant(
        f"{_COUNTS}:CountsView._restore",
        "if self._client.run_id != self._run_id:",
        "if True:",
        [("over", "handled", "kill front 1"), ("answered", "handled", "cut dispatcher 1")],
    ),
}
