"""Changes of the configuration file while the server runs, valid and invalid ones."""

import copy
from random import Random
from typing import Any, NamedTuple

from simulation.deployment import NODE_PORT, NODES, Deployment


class Edit(NamedTuple):
    """New content of the file, the errors that it may cause, and for which models; None: for all.

    `keys` are the API keys that it removes.
    """

    content: dict[str, Any] | bytes
    allowed_errors: frozenset[str] = frozenset()
    models: frozenset[str] | None = None
    keys: frozenset[str] = frozenset()


def edits(deployment: Deployment, random: Random) -> list[Edit]:
    """Return all changes that are possible in this deployment."""
    document = deployment.document
    found = [
        Edit(b"models: [this is no"),
        Edit(b"\xff\xfe\x00"),
        Edit({**document, "models": {"alpha": {"path": "/nowhere/at/all"}}}, frozenset()),
        Edit({**document, "nonsense": 1}),
        Edit(copy.deepcopy(document)),
        Edit({**document, "limits": {**document["limits"], "drain": 7}}),
    ]
    for name in document["models"]:
        changed = copy.deepcopy(document)
        changed["models"][name]["ttl"] = 333
        found.append(Edit(changed, frozenset({"queue_timeout", "queue_full"}), frozenset({name})))
        if len(document["models"]) > 1:
            less = copy.deepcopy(document)
            del less["models"][name]
            gone = {"model_not_found", "not_found", "node_failed", "no_node", "queue_timeout", "load_failed"}
            found.append(Edit(less, frozenset(gone | {"queue_full"}), frozenset({name})))
    for index, node in enumerate(document["nodes"]):
        less = copy.deepcopy(document)
        del less["nodes"][index]
        models = frozenset(deployment.nodes[node["id"]].names.values())
        gone = frozenset({"model_not_found", "no_node", "queue_timeout", "queue_full", "not_found"})
        found.append(Edit(less, gone, models))
    for node in set(NODES) - set(deployment.nodes):
        more = copy.deepcopy(document)
        more["nodes"].append({"id": node, "url": f"http://{NODES[node]}:{NODE_PORT}", "models": ["nobody"]})
        found.append(Edit(more))
    if deployment.has_keys:
        person = random.choice(deployment.people)
        less = copy.deepcopy(document)
        less["apiKeys"] = [key for key in less["apiKeys"] if key["key"] != person.key]
        found.append(Edit(less, frozenset({"invalid_api_key"}), None, frozenset({person.key or ""})))
    return found
