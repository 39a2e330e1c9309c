"""The lease in Kubernetes: the object as client-go writes it, conflicts, failures, tokens and TLS."""

import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest
import trio

from distributed.ipc.test_connection import make_certificate
from distributed.lease.cluster_api import ClusterApi
from distributed.lease.election import Election, until, unwrapped_loss
from fairlead.distributed.lease import LeaseLost, StoredLease, kubernetes
from fairlead.distributed.lease.contender import LeaseRecord, Replace
from fairlead.distributed.lease.lease import StoreFailed

DURATION_S = 1.0
NAME = "fairlead"
# RFC 3339 with microseconds, Kubernetes' MicroTime.
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture
def api(tmp_path):
    with cluster(tmp_path) as api:
        yield api


@contextmanager
def cluster(folder, **options):
    api = ClusterApi(folder, **options)
    try:
        yield api
    finally:
        api.close()


def lease_of(api, **options):
    return StoredLease(
        lambda: kubernetes.connect(api.access, NAME),
        duration_s=DURATION_S,
        least_epoch=kubernetes.least_epoch,
        **options,
    )


def released(api, **metadata):
    """Let the object be there, released by an earlier leader of epoch 7, so that nothing waits."""
    api.objects[NAME] = {"metadata": {"name": NAME, **metadata}}
    api.change(NAME, holderIdentity="", leaseTransitions=7, leaseDurationSeconds=1)


async def test_object_has_the_fields_that_client_go_writes(api):
    async with kubernetes.connect(api.access, NAME) as store:
        claim = await store.replace(Replace(None, "a", 0, 1.5))
        await store.replace(Replace(claim, "a", 5, 1.5))
    written = api.objects[NAME]
    assert (written["apiVersion"], written["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert written["metadata"] == {"name": NAME, "namespace": "team", "resourceVersion": "2"}
    times = [written["spec"].pop("acquireTime"), written["spec"].pop("renewTime")]
    assert [MICRO_TIME.fullmatch(text) is not None for text in times] == [True, True]
    age = datetime.now(UTC) - datetime.fromisoformat(times[0])
    assert abs(age.total_seconds()) < 60
    assert written["spec"] == {"holderIdentity": "a", "leaseDurationSeconds": 2, "leaseTransitions": 5}


async def test_renewal_in_another_session_keeps_what_others_wrote_and_the_time_of_acquisition(api):
    released(api, labels={"app": "fairlead"}, ownerReferences=[{"name": "owner"}])
    api.change(NAME, strategy="OldestEmulationVersion")
    async with kubernetes.connect(api.access, NAME) as store:
        ours = await store.replace(Replace(await store.read(), "a", 8, 1.0))
    acquired = api.objects[NAME]["spec"]["acquireTime"]
    async with kubernetes.connect(api.access, NAME) as store:
        renewed = await store.replace(Replace(ours, "a", 8, 1.0))
    written = api.objects[NAME]
    assert renewed == LeaseRecord("a", 8, 1.0, written["metadata"]["resourceVersion"])
    assert written["metadata"]["labels"] == {"app": "fairlead"}
    assert written["metadata"]["ownerReferences"] == [{"name": "owner"}]
    assert written["spec"]["strategy"] == "OldestEmulationVersion"
    assert written["spec"]["acquireTime"] == acquired != written["spec"]["renewTime"]


async def test_write_after_another_is_a_conflict_also_in_another_session(api):
    released(api)
    async with kubernetes.connect(api.access, NAME) as store:
        seen = await store.read()
        api.change(NAME, holderIdentity="another")
        assert await store.replace(Replace(seen, "a", 8, 1.0)) is None
    async with kubernetes.connect(api.access, NAME) as store:
        assert await store.replace(Replace(seen, "a", 8, 1.0)) is None
        assert await store.replace(Replace(None, "a", 8, 1.0)) is None
    assert api.objects[NAME]["spec"]["holderIdentity"] == "another"


async def test_deleted_object_is_missing_and_its_update_fails(api):
    released(api)
    async with kubernetes.connect(api.access, NAME) as store:
        seen = await store.read()
        api.delete(NAME)
        assert await store.replace(Replace(seen, "a", 8, 1.0)) is None
        assert await store.read() is None


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
async def test_other_statuses_are_failures(status, api):
    released(api)
    async with kubernetes.connect(api.access, NAME) as store:
        seen = await store.read()
        for write in (Replace(seen, "a", 8, 1.0), Replace(None, "a", 0, 1.0)):
            api.faults = [status]
            with pytest.raises(StoreFailed, match=f"status {status}"):
                await store.replace(write)
        api.faults = [status]
        with pytest.raises(StoreFailed, match=f"status {status}"):
            await store.read()


@pytest.mark.parametrize(
    "broken",
    [
        {"spec": ["x"]},
        {"spec": {"leaseTransitions": "many"}},
        {"spec": {"leaseDurationSeconds": 1e999}, "metadata": None},
        {"metadata": {}},
        {"spec": {"leaseTransitions": float("inf")}},
    ],
)
async def test_object_of_another_form_is_a_failure(broken, api):
    released(api)
    api.objects[NAME] |= broken
    async with kubernetes.connect(api.access, NAME) as store:
        with pytest.raises(StoreFailed):
            await store.read()


async def test_answer_without_bound_is_a_failure(api):
    released(api, annotations={"long": "x" * kubernetes.ANSWER_BYTES})
    async with kubernetes.connect(api.access, NAME) as store:
        with pytest.raises(StoreFailed, match="too large"):
            await store.read()


async def test_rotated_token_is_used_and_an_old_one_is_a_failure(api, tmp_path):
    released(api)
    async with kubernetes.connect(api.access, NAME) as store:
        await store.read()
        api.token = "the next token"
        with pytest.raises(StoreFailed, match="status 401"):
            await store.read()
        (tmp_path / "token").write_text("the next token\n")
        assert (await store.read()).epoch == 7
        (tmp_path / "token").write_bytes(b"\xff\xfe")
        with pytest.raises(StoreFailed):
            await store.read()
        (tmp_path / "token").unlink()
        with pytest.raises(StoreFailed):
            await store.read()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes a certificate")
async def test_server_needs_a_certificate_of_the_cluster(tmp_path):
    certificate = make_certificate(tmp_path)
    with cluster(tmp_path, certificate=certificate) as api:
        released(api)
        async with kubernetes.connect(api.access, NAME) as store:
            assert (await store.read()).epoch == 7
        (tmp_path / "other").mkdir()
        other, _ = make_certificate(tmp_path / "other")
        async with kubernetes.connect(replace(api.access, ca_file=str(other)), NAME) as store:
            with pytest.raises(StoreFailed, match="CERTIFICATE_VERIFY_FAILED"):
                await store.read()
        with pytest.raises(StoreFailed):
            async with kubernetes.connect(replace(api.access, ca_file=str(tmp_path / "none")), NAME):
                pass


async def test_leader_loses_the_lease_at_a_conflict_and_leaves_the_other_record(api):
    released(api)
    with trio.fail_after(10), pytest.raises(LeaseLost), unwrapped_loss():  # noqa: PT012
        async with trio.open_nursery() as nursery:
            term = await nursery.start(lease_of(api).hold)
            api.change(NAME, holderIdentity="another", leaseTransitions=term.epoch + 1)
    assert api.objects[NAME]["spec"]["holderIdentity"] == "another"


async def test_leader_outlasts_single_failures_of_each_kind(api):
    released(api)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            term = await nursery.start(lease_of(api).hold)
            for fault in (401, 403, 429, 500, "cut", DURATION_S / 3):
                api.faults = [fault]
                await until(lambda: not api.faults)
                renewed = term.valid_until_s
                await until(lambda before=renewed: term.valid_until_s != before)
                assert term.is_valid()
            assert api.objects[NAME]["spec"]["leaseTransitions"] == term.epoch
            nursery.cancel_scope.cancel()


async def test_forbidden_leader_ends_before_the_lease_may_be_taken(api):
    released(api)
    with trio.fail_after(10), pytest.raises(LeaseLost), unwrapped_loss():  # noqa: PT012
        async with trio.open_nursery() as nursery:
            term = await nursery.start(lease_of(api).hold)
            api.faults = [403] * 1000
    assert not term.is_valid()


async def test_lease_of_another_controller_is_respected_until_it_is_not_renewed(api):
    """Its duration counts, if it is longer than ours, and its clock does not."""
    now = datetime(2001, 1, 1, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    api.change(NAME, holderIdentity="other", leaseDurationSeconds=2, leaseTransitions=3, renewTime=now)
    election = Election()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(election.run, lambda: lease_of(api))
            for _ in range(3):
                await trio.sleep(1)
                api.change(NAME, renewTime=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
            last = time.monotonic()
            assert (election.terms, "PUT" in api.requests) == ([], False)
            await election.wait_for_leader(10)
            assert time.monotonic() - last >= 2
            assert election.terms[0].epoch > 3
            nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_there_is_one_leader_whatever_the_api_answers(seed, api):
    random, election = Random(seed), Election()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(election.run, lambda: lease_of(api))
            for _ in range(4):
                await election.wait_for_leader(4 * DURATION_S)
                kinds = random.choices((None, 409, 401, 429, 500, "cut", 0.2, 0.3), k=20)
                api.faults = kinds
                await trio.sleep(random.uniform(0.2, 1.5) * DURATION_S)
                election.stop_leader()
                if random.random() < 0.3 and NAME in api.objects:
                    api.delete(NAME)
                api.faults = []
            await election.wait_for_leader(4 * DURATION_S)
            nursery.cancel_scope.cancel()
    assert len(election.terms) >= 2
