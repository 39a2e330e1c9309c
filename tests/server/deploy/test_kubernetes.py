"""The manifests for Kubernetes: what they refer to exists, and their configurations are valid.

The tests run without Kubernetes and check the files only. The lease's requests are sent to the API of the
lease tests, `ClusterApi`, which applies the rules of the Role.
"""

import re
from contextlib import contextmanager
from copy import deepcopy
from urllib.parse import urlsplit

import pytest
import trio
import yaml

from distributed.lease.cluster_api import ClusterApi
from fairlead.distributed.ipc.address import LinkAddress
from fairlead.distributed.lease import StoredLease, kubernetes
from fairlead.distributed.lease.contender import Replace
from fairlead.distributed.lease.lease import StoreFailed
from fairlead.server.cli import main
from fairlead.server.configfile.read import read_config
from fairlead.server.routes.route_table import ROUTES
from server.deploy.manifests import (
    BASE,
    FOLDER,
    container,
    kustomization,
    mounted_files,
    named,
    objects,
    of_kind,
    pod,
    ports,
    selected,
    template,
    workloads,
)

SECRET_KEYS = {"link-key", "node-key", "api-key"}
ENVIRONMENT = {"FAIRLEAD_KEY": "sk-1", "FAIRLEAD_NODE_KEY": "node-key"}
ROLES = {"front": "fairlead-front", "dispatcher": "fairlead-dispatcher", "node": "fairlead-node"}


def config(role):
    return read_config(BASE / "config" / f"{role}.yaml", ENVIRONMENT).config


# Files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/autoscaling"])
def test_kustomization_lists_all_files_of_its_folder_and_no_others(folder):
    listed = kustomization(FOLDER / folder)
    files = [*listed["resources"], *(patch["path"] for patch in listed.get("patches", ()))]
    files += [file for made in listed.get("configMapGenerator", ()) for file in made["files"]]
    files = [file for file in files if file != "../../base"]
    there = {str(path.relative_to(FOLDER / folder)) for path in (FOLDER / folder).rglob("*.yaml")}
    assert sorted(files) == sorted(there - {"kustomization.yaml"})


def test_every_file_is_yaml_and_every_object_has_a_name_of_its_own():
    for path in FOLDER.rglob("*.yaml"):
        assert list(yaml.safe_load_all(path.read_text())), path
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in objects()]
    assert len(set(names)) == len(names)


def test_gpu_patch_changes_fields_that_exist():
    nodes = named("LeaderWorkerSet", "fairlead-node")
    (patch,) = kustomization(FOLDER / "overlays" / "gpu")["patches"]
    target = patch["target"]
    assert nodes["apiVersion"] == f"{target['group']}/{target['version']}"
    assert (nodes["kind"], nodes["metadata"]["name"]) == (target["kind"], target["name"])
    for step in yaml.safe_load((FOLDER / "overlays" / "gpu" / "node.yaml").read_text()):
        *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
        place = nodes
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        assert (last in place) == (step["op"] == "replace"), step


def test_autoscaler_scales_the_fronts():
    text = (FOLDER / "overlays" / "autoscaling" / "autoscaler.yaml").read_text()
    autoscaler = yaml.safe_load(text)
    target = autoscaler["spec"]["scaleTargetRef"]
    front = named("Deployment", target["name"])
    assert (target["apiVersion"], target["kind"]) == (front["apiVersion"], front["kind"])
    assert autoscaler["spec"]["minReplicas"] <= front["spec"]["replicas"]
    assert container(target["name"])["resources"]["requests"]["cpu"]


# References between objects --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "workload"),
    [
        ("fairlead", "fairlead-front"),
        ("fairlead-dispatcher", "fairlead-dispatcher"),
        ("fairlead-node", "fairlead-node"),
    ],
)
def test_service_selects_the_pods_of_one_workload_and_a_port_of_theirs(service, workload):
    spec = named("Service", service)["spec"]
    assert selected(spec["selector"]) == [workload]
    assert {port["targetPort"] for port in spec["ports"]} == set(ports(workload))


def test_workloads_select_their_own_pods():
    for each in workloads():
        if "selector" in each["spec"]:
            assert selected(each["spec"]["selector"]["matchLabels"]) == [each["metadata"]["name"]]


def test_disruption_budgets_and_network_policies_select_the_workload_of_their_name():
    for each in of_kind("PodDisruptionBudget", "NetworkPolicy"):
        selector = each["spec"].get("selector") or each["spec"]["podSelector"]
        assert selected(selector["matchLabels"]) == [each["metadata"]["name"]]
    assert {each["metadata"]["name"] for each in of_kind("NetworkPolicy")} == set(ROLES.values())


def test_network_policies_allow_the_connections_that_there_are():
    allowed = {}
    for each in of_kind("NetworkPolicy"):
        (rule,) = each["spec"]["ingress"]
        sources = [source["podSelector"]["matchLabels"] for source in rule.get("from", ())]
        name = each["metadata"]["name"]
        allowed[name] = sorted(found for labels in sources for found in selected(labels))
        assert {port["port"] for port in rule["ports"]} == set(ports(name))
    assert allowed == {
        "fairlead-front": [],  # from everywhere
        "fairlead-dispatcher": ["fairlead-front"],
        "fairlead-node": ["fairlead-dispatcher", "fairlead-front"],
    }


@pytest.mark.parametrize("role", ROLES)
def test_command_and_configuration_refer_to_mounted_files(role):
    files = mounted_files(ROLES[role])
    _, _, path = container(ROLES[role])["args"]
    assert files[path] == ("configMap", "fairlead", f"{role}.yaml")
    (generated,) = kustomization(BASE)["configMapGenerator"]
    assert generated["name"] == "fairlead"
    assert f"config/{role}.yaml" in generated["files"]
    if (key := config(role).dispatcher.key_file) is not None:
        assert files[str(key)] == ("secret", "fairlead", "link-key")


@pytest.mark.parametrize("role", ROLES)
def test_variables_of_the_configuration_are_those_of_the_container(role):
    used = set(re.findall(r"\$\{env\.(\w+)\}", (BASE / "config" / f"{role}.yaml").read_text()))
    given = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in container(ROLES[role])["env"]
        if "valueFrom" in each
    }
    assert used == set(given)
    assert {(secret["name"], secret["key"] in SECRET_KEYS) for secret in given.values()} <= {
        ("fairlead", True)
    }


def test_instructions_create_the_keys_of_the_secret():
    text = (BASE / "kustomization.yaml").read_text()
    assert set(re.findall(r"--from-literal=([\w-]+)=", text)) == SECRET_KEYS


def test_namespace_of_the_binding_is_that_of_all_objects():
    (binding,) = of_kind("RoleBinding")
    (subject,) = binding["subjects"]
    assert subject["namespace"] == kustomization(BASE)["namespace"]
    named("ServiceAccount", subject["name"])
    named(binding["roleRef"]["kind"], binding["roleRef"]["name"])
    assert pod("fairlead-dispatcher")["serviceAccountName"] == subject["name"]


def test_only_the_dispatcher_gets_a_token():
    got = {each["metadata"]["name"] for each in workloads()}
    got -= {name for name in got if pod(name).get("automountServiceAccountToken") is False}
    assert got == {"fairlead-dispatcher"}


def test_pods_have_few_rights():
    for each in workloads():
        spec = template(each)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        (only,) = spec["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


# The configurations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_configuration_is_read_without_a_fault(role, capsys, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "check", str(BASE / "config" / f"{role}.yaml")]) == 0
    assert "is good" in capsys.readouterr().out


def test_fronts_have_the_address_of_each_dispatcher():
    stateful, service = named("StatefulSet", "fairlead-dispatcher"), named("Service", "fairlead-dispatcher")
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    port = LinkAddress.parse(config("dispatcher").dispatcher.listen).port
    assert ports("fairlead-dispatcher") == {"link": port}
    names = [f"fairlead-dispatcher-{number}" for number in range(stateful["spec"]["replicas"])]
    expected = [f"tcp://{name}.fairlead-dispatcher:{port}" for name in names]
    assert list(config("front").dispatcher.addresses) == expected


def test_dispatcher_finds_the_nodes_of_the_headless_service_and_has_their_key():
    (node,) = config("dispatcher").nodes
    service = named("Service", "fairlead-node")
    parts = urlsplit(node.url.removeprefix("dns+"))
    assert (node.is_discovered, parts.hostname) == (True, service["metadata"]["name"])
    assert parts.port == config("node").port == ports("fairlead-node")["http"]
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]
    assert [key.key for key in config("node").api_keys] == [node.api_key]
    assert config("node").queue.capacity == 0


def test_front_and_dispatcher_have_the_same_queue():
    assert config("front").queue == config("dispatcher").queue
    assert config("front").port == ports("fairlead-front")["http"]


@pytest.mark.parametrize("role", ["front", "node"])
def test_pod_has_the_time_that_draining_takes(role):
    limits = config(role).limits
    spec = pod(ROLES[role])
    assert limits.drain_delay_s + limits.drain_s + 10 <= spec["terminationGracePeriodSeconds"]
    readiness = container(ROLES[role])["readinessProbe"]
    # The endpoints change after some probes have failed, here within the delay.
    noticed_s = readiness["periodSeconds"] * readiness.get("failureThreshold", 3)
    assert noticed_s < limits.drain_delay_s
    assert "lifecycle" not in container(ROLES[role])


def test_probes_are_routes_that_need_no_key():
    open_paths = {route.path for route in ROUTES if route.permission.name == "PROBE"}
    for name in ("fairlead-front", "fairlead-node"):
        for kind, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
            probe = container(name)[f"{kind}Probe"]["httpGet"]
            assert (probe["path"], probe["port"]) == (path, "http")
            assert path in open_paths


# The lease and its rights ----------------------------------------------------------------------------


@contextmanager
def cluster(folder, rules):
    api = ClusterApi(folder, rules=rules)
    try:
        yield api
    finally:
        api.close()


async def lead_and_release(api, name):
    """Claim, take over, renew and release the lease; raise `StoreFailed` if a request is refused."""
    async with kubernetes.connect(api.access, name) as store:
        claim = await store.read() or await store.replace(Replace(None, "a", 0, 1.0))
        taken = await store.replace(Replace(claim, "a", 1, 1.0))
        renewed = await store.replace(Replace(taken, "a", 1, 1.0))
        await store.replace(Replace(renewed, "", 1, 1.0))
    return await lead_by_another(api, name)


async def lead_by_another(api, name):
    lease = StoredLease(lambda: kubernetes.connect(api.access, name), duration_s=1.0)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            term = await nursery.start(lease.hold)
            nursery.cancel_scope.cancel()
    return term.epoch


async def test_role_allows_the_requests_of_the_lease(tmp_path):
    rules = named("Role", "fairlead-dispatcher")["rules"]
    with cluster(tmp_path, rules) as api:
        assert await lead_and_release(api, config("dispatcher").lease.kubernetes) == 2
        assert set(api.requests) == {"GET", "POST", "PUT"}


async def test_role_allows_nothing_else(tmp_path):
    rules = named("Role", "fairlead-dispatcher")["rules"]
    name = config("dispatcher").lease.kubernetes
    (resources,) = {tuple(rule["resources"]) for rule in rules}
    verbs = [verb for rule in rules for verb in rule["verbs"]]
    assert (resources, sorted(verbs)) == (("leases",), ["create", "get", "update"])
    for index, rule in enumerate(rules):
        for verb in rule["verbs"]:
            fewer = deepcopy(rules)
            fewer[index]["verbs"].remove(verb)
            with cluster(tmp_path, fewer) as api, pytest.raises(StoreFailed, match="status 403"):
                await lead_and_release(api, name)
    with cluster(tmp_path, rules) as api, pytest.raises(StoreFailed, match="status 403"):
        await lead_and_release(api, "another")
