"""The lease that a configuration names is the one that is used."""

import pytest
import trio

from distributed.lease.cluster_api import ClusterApi
from fairlead.base.config import ConfigError, LeaseConfig
from fairlead.distributed.lease import factory, make_lease


def test_redis_key_of_the_configuration_is_used(monkeypatch):
    pytest.importorskip("coredis")
    used = []
    monkeypatch.setattr(factory.redis, "connect", lambda *arguments: used.append(arguments))
    lease = make_lease(LeaseConfig(redis="redis://here:1", redis_key="other:lease"), {})
    lease._session()
    assert used == [("redis://here:1", "other:lease")]


async def test_kubernetes_object_of_the_configuration_is_used(tmp_path, monkeypatch):
    api = ClusterApi(tmp_path)
    try:
        monkeypatch.setattr(factory, "cluster_access", lambda _: api.access)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                lease = make_lease(LeaseConfig(kubernetes="fairlead", duration_s=1), {})
                term = await nursery.start(lease.hold)
                assert list(api.objects) == ["fairlead"]
                assert api.objects["fairlead"]["spec"]["leaseTransitions"] == term.epoch
                nursery.cancel_scope.cancel()
        assert api.objects["fairlead"]["spec"]["holderIdentity"] == ""
    finally:
        api.close()


def test_kubernetes_lease_outside_of_a_pod_is_refused():
    with pytest.raises(ConfigError, match=r"lease\.kubernetes: works in a pod only"):
        make_lease(LeaseConfig(kubernetes="fairlead"), {})
