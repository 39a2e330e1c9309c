"""The parsed manifests of `fairlead deploy kubernetes`, and functions that look up their objects."""

from functools import cache
from pathlib import Path

import yaml

import fairlead

FOLDER = Path(fairlead.__file__).parent / "server" / "deploy" / "kubernetes"
BASE = FOLDER / "base"


@cache
def kustomization(folder):
    return yaml.safe_load((folder / "kustomization.yaml").read_text())


@cache
def objects():
    """All objects of the base, in their order."""
    files = kustomization(BASE)["resources"]
    return [
        each for file in files for each in yaml.safe_load_all((BASE / file).read_text()) if each is not None
    ]


def of_kind(*kinds):
    return [each for each in objects() if each["kind"] in kinds]


def named(kind, name):
    (found,) = [each for each in of_kind(kind) if each["metadata"]["name"] == name]
    return found


def template(workload):
    """The pod template of a workload, with the labels that its controller adds."""
    spec = workload["spec"]
    if workload["kind"] != "LeaderWorkerSet":
        return spec["template"]
    made = spec["leaderWorkerTemplate"]["workerTemplate"]
    labels = made["metadata"]["labels"] | {
        "leaderworkerset.sigs.k8s.io/name": workload["metadata"]["name"],
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    return made | {"metadata": {"labels": labels}}


def workloads():
    return of_kind("Deployment", "StatefulSet", "LeaderWorkerSet")


def selected(labels):
    """The names of the workloads whose pods have these labels."""
    assert labels
    return [
        each["metadata"]["name"]
        for each in workloads()
        if labels.items() <= template(each)["metadata"]["labels"].items()
    ]


def pod(name):
    """The pod spec of a workload."""
    (found,) = [each for each in workloads() if each["metadata"]["name"] == name]
    return template(found)["spec"]


def container(name):
    (found,) = pod(name)["containers"]
    return found


def ports(name):
    """The ports of a workload's container, by name."""
    return {port["name"]: port["containerPort"] for port in container(name)["ports"]}


def mounted_files(name):
    """The files that a pod mounts from ConfigMaps and Secrets: (kind, name, key) by path."""
    mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
    found = {}
    for volume in pod(name)["volumes"]:
        for kind, field in (("configMap", "name"), ("secret", "secretName")):
            for item in volume.get(kind, {}).get("items", ()):
                path = f"{mounts[volume['name']]}/{item['path']}"
                found[path] = (kind, volume[kind][field], item["key"])
    return found
