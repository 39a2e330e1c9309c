"""`fairlead deploy`: writes the files that run Fairlead as a service, which ship in the package."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from fairlead.base.config import ConfigError

Target = Literal["systemd", "docker", "compose", "kubernetes", "grafana"]

FILES: dict[Target, tuple[tuple[str, str], ...]] = {
    "systemd": (("server/deploy", "fairlead.service"),),
    "docker": (("server/deploy", "Dockerfile"), ("server/deploy", "Dockerfile.cuda")),
    "compose": (("server/deploy/compose", "compose.yaml"), ("server/deploy/compose", "fairlead.yaml")),
    "kubernetes": tuple(
        ("server/deploy/kubernetes", name)
        for name in (
            "base/kustomization.yaml",
            "base/front.yaml",
            "base/dispatcher.yaml",
            "base/node.yaml",
            "base/network.yaml",
            "base/config/front.yaml",
            "base/config/dispatcher.yaml",
            "base/config/node.yaml",
            "overlays/gpu/kustomization.yaml",
            "overlays/gpu/node.yaml",
            "overlays/autoscaling/kustomization.yaml",
            "overlays/autoscaling/autoscaler.yaml",
        )
    ),
    "grafana": (("generation/metrics", "grafana.json"),),
}


def deploy(target: Target, folder: Path, *, force: bool) -> int:
    """Write the target's files and print their paths. Raises `ConfigError` if one exists, unless `force`."""
    written = [(_file(*parts), folder / parts[-1]) for parts in FILES[target]]
    taken = [str(path) for _, path in written if path.exists()]
    if taken and not force:
        raise ConfigError(f"{', '.join(taken)}: exists already; --force overwrites it")
    folder.mkdir(parents=True, exist_ok=True)
    for source, path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
        print(path)
    return 0


def _file(package: str, name: str) -> Traversable:
    return files("fairlead") / package / name
