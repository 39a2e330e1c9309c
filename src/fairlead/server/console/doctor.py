"""`fairlead doctor`: checks whether a server would run on this machine, and suggests fixes.

Changes nothing. torch is queried in a child process, because this process never imports it.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from fairlead.base.config import UNIX_PREFIX, Config, ConfigError, demonstration_model
from fairlead.base.runtime.compilers import ADVICE
from fairlead.language.text.hub import find_local
from fairlead.server.configfile import Reading, read_config
from fairlead.server.console.options import model_at

Verdict = Literal["good", "warning", "bad"]

MIN_MEMORY_GIB = 2
MIN_DISK_GIB = 2
MIN_FILES = 4096
GIB = 1024**3
CHILD_TIMEOUT_S = 120
MODEL = "model"  # the name of what is found about a model
NAME = 14  # characters, the minimum width of the column of names
MARKS = {"good": "[green]✓[/]", "warning": "[yellow]![/]", "bad": "[red]✗[/]"}

# Runs in a child process: the version of torch, and its devices.
TORCH_PROBE = """
import json, torch
from fairlead.engine.threads import default_threads
devices = [
    {"name": torch.cuda.get_device_name(i), "memory": torch.cuda.get_device_properties(i).total_memory}
    for i in range(torch.cuda.device_count())
]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices,
                  "threads": default_threads()}))
"""
KERNEL_PROBE = """
from fairlead._cext import cpustep
print(', '.join(f'{dtype}: {cpustep.variants(dtype)[0]}' for dtype in cpustep.DTYPES))
"""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    name: what was checked.
    verdict: how good it is.
    found: what there is.
    advice: what to do; empty if nothing.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def doctor(
    *, model: str | None, config: Path | None, host: str | None, port: int | None, as_json: bool
) -> int:
    """Run all checks and print the findings. Return the exit code: 0 if none is bad.

    model: a model to check, too, as `serve` takes it.
    config: a configuration file to check, too.
    host: the address to listen on; None: that of the file, or else that of `serve`.
    port: the port; None: as for `host`.
    as_json: whether to print JSON.
    """
    findings = list(_findings(model, config, host, port))
    failed = any(finding.verdict == "bad" for finding in findings)
    if as_json:
        print(json.dumps([msgspec.to_builtins(finding) for finding in findings], indent=2))
        return int(failed)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid(padding=(0, 1))
    lines.add_column()
    lines.add_column(no_wrap=True, min_width=NAME)
    lines.add_column(overflow="fold")
    for finding in findings:
        lines.add_row(MARKS[finding.verdict], finding.name, Text(finding.found))
        if finding.advice:
            lines.add_row("", "", Text(finding.advice, "dim"))
    console = Console(highlight=False)
    console.print(lines)
    bad = {finding.name for finding in findings if finding.verdict == "bad"}
    if not bad:
        console.print("[green]A server will run here.[/]")
    elif bad == {MODEL}:
        console.print("[red]A server will not load all of its models here yet.[/]")
    else:
        console.print("[red]A server will not run here yet.[/]")
    return int(failed)


def _findings(model: str | None, file: Path | None, host: str | None, port: int | None) -> Iterator[Finding]:
    reading = None if file is None else _reading(file)
    config = reading.config if isinstance(reading, Reading) else Config(models=())
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _torch,
        _kernels,
        _memory,
        _disk,
        _files,
        lambda: _port(host or config.host, config.port if port is None else port),
        _model_hub,
        lambda: _configuration(file, reading),
        lambda: _model(model),
    ]
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("Python", "good", f"{version} on {platform.system()} {platform.machine()}")
    yield Finding("Fairlead", "good", metadata.version("fairlead"))


def _torch() -> Iterator[Finding]:
    found, problem = _in_a_child(TORCH_PROBE)
    if found is None:
        yield Finding("torch", "bad", problem, "pip install 'torch>=2.9,<2.14', which Fairlead depends on.")
        return
    torch = json.loads(found)
    yield Finding("torch", "good", torch["version"])
    for device in torch["devices"]:
        yield Finding("GPU", "good", f"{device['name']}, {device['memory'] / GIB:.0f} GiB")
    if torch["devices"] and not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        yield Finding("C compiler", "bad", "none; Triton needs one for its GPU kernels", f"{ADVICE}.")
    if not torch["devices"]:
        has_driver = shutil.which("nvidia-smi") is not None
        advice = "This torch was built without CUDA: install one with it." if has_driver else ""
        yield Finding("GPU", "warning" if has_driver else "good", "none; models run on the CPU", advice)
    yield Finding(
        "processor", "good", f"{os.cpu_count()} threads, of which the engine uses {torch['threads']}"
    )


def _kernels() -> Iterator[Finding]:
    found, problem = _in_a_child(KERNEL_PROBE)
    if found is None:
        yield Finding("kernels", "bad", problem, f"Install Fairlead again; before that {ADVICE}.")
    else:
        yield Finding("kernels", "good", f"the step on the CPU uses {found}")


def _memory() -> Iterator[Finding]:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
        free_gib = pages * os.sysconf("SC_PAGE_SIZE") / GIB
    except (ValueError, OSError):
        yield Finding("memory", "warning", "this system does not report how much is free")
        return
    if free_gib < MIN_MEMORY_GIB:
        yield Finding(
            "memory", "warning", f"{free_gib:.1f} GiB free", "Only small models will fit. Free some memory."
        )
    else:
        yield Finding("memory", "good", f"{free_gib:.0f} GiB free")


def _disk() -> Iterator[Finding]:
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_gib = shutil.disk_usage(existing).free / GIB
    advice = (
        "Models are downloaded there: free some space, or set HF_HOME." if free_gib < MIN_DISK_GIB else ""
    )
    yield Finding("disk", "warning" if advice else "good", f"{free_gib:.0f} GiB free for {cache}", advice)


def _files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not Unix
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the server raises its soft limit to this
    if 0 <= most < MIN_FILES:
        yield Finding(
            "open files",
            "warning",
            f"at most {most}",
            f"Each connection takes up to three: raise the hard limit, as with `ulimit -Hn {MIN_FILES}`.",
        )
    else:
        yield Finding("open files", "good", f"at most {most}" if most >= 0 else "no limit")


def _port(host: str, port: int) -> Iterator[Finding]:
    if host.startswith(UNIX_PREFIX):
        yield _socket(Path(host.removeprefix(UNIX_PREFIX)))
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            yield Finding(
                "port",
                "bad",
                f"{host}:{port}: {error.strerror or error}",
                f"Perhaps a server runs already ({_ps(host, port)}); else choose another with --port.",
            )
            return
    yield Finding("port", "good", f"{host}:{port} is free")


def _ps(host: str, port: int) -> str:
    """Return the command that shows the server at a port."""
    if port == Config(models=()).port:
        return "`fairlead ps`"
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"`fairlead ps --url http://{shown}:{port}`"


def _socket(path: Path) -> Finding:
    if path.exists() and not path.is_socket():
        return Finding("socket", "bad", f"{path} is a file of another kind", "Choose another with --host.")
    with socket.socket(socket.AF_UNIX) as trial:
        if not trial.connect_ex(str(path)):
            advice = f"`fairlead ps --url {UNIX_PREFIX}{path}` shows it if it is a Fairlead."
            return Finding("socket", "bad", f"a server listens on {path}", advice)
    if not os.access(path.parent, os.W_OK):
        return Finding("socket", "bad", f"{path.parent} cannot be written", "Choose another with --host.")
    return Finding("socket", "good", f"{path} is free")


def _model_hub() -> Iterator[Finding]:
    version = metadata.version("huggingface_hub")
    token = "a token is set" if os.environ.get("HF_TOKEN") else "no HF_TOKEN: open models only"
    yield Finding("model hub", "good", f"huggingface_hub {version}, {token}")
    if not (demonstration_model() / "config.json").is_file():
        yield Finding("demonstration", "bad", "the small model is missing", "Install Fairlead again.")


def _reading(file: Path) -> Reading | Exception:
    """Return the parsed file, or the error that prevented it."""
    try:
        return read_config(file, os.environ)
    except (ConfigError, OSError) as error:
        return error


def _configuration(file: Path | None, reading: Reading | Exception | None) -> Iterator[Finding]:
    if reading is None:
        return
    if isinstance(reading, Exception):
        first, _, rest = str(reading).partition("\n")
        yield Finding("configuration", "bad", first, rest)
        return
    config = reading.config
    found = f"{file}: {_counted(len(config.models), 'model')}, {_counted(len(config.nodes), 'node')}"
    without = ", ".join(reading.without_effect)
    yield Finding("configuration", "good", found, f"Without effect here: {without}" if without else "")
    yield from _models(config)


def _models(config: Config) -> Iterator[Finding]:
    from fairlead.server.console.model_faults import faults_of, models_to_fetch

    for name, reason in faults_of(config).items():
        yield Finding(MODEL, "bad", f"{name} cannot be loaded: {reason}")
    for name in models_to_fetch(config):
        yield Finding(MODEL, "warning", f"{name} is not on this machine: a server fetches it from the hub")


def _model(requested: str | None) -> Iterator[Finding]:
    """Check one model: whether it will run, how much memory it takes, and how fast it is."""
    if requested is None:
        return
    config = Config(models=(model_at(requested),))
    findings = list(_models(config))
    yield from findings
    path = find_local(requested)
    if findings or path is None:
        return
    found, problem = _in_a_child("from fairlead.engine.needs import main; main()", str(path))
    if found is None:
        yield Finding(MODEL, "bad", f"{requested} cannot be loaded: {problem}")
        return
    needs = json.loads(found)
    speed = (
        "" if needs["tokens_per_s"] is None else f"; one stream: at most {needs['tokens_per_s']:.0f} tokens/s"
    )
    yield Finding(MODEL, "good", f"{config.models[0].name} runs on {needs['runs_on']}{speed}")
    gib, free_gib = needs["weight_bytes"] / GIB, _available_bytes() / GIB
    weights = f"{gib:.2f} GiB of weights ({needs['file_bytes'] / GIB:.2f} in the file), up to 1 GiB of cache"
    advice = ""
    if needs["restored"]:
        advice = f"{', '.join(needs['restored'])} are restored to numbers here, which takes more memory."
    if gib + 1 > free_gib:
        yield Finding(MODEL, "warning", f"{weights}; {free_gib:.1f} GiB are available", advice)
    else:
        yield Finding(MODEL, "good", weights, advice)


def _available_bytes() -> int:
    """Return how much memory programs can still take, with what the system would give up of its caches."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _in_a_child(code: str, *arguments: str) -> tuple[str | None, str]:
    """Run code in another interpreter; return its output, or None and the reason of its failure."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    try:
        ran = subprocess.run(  # noqa: S603 - our own code
            command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"it did not end within {CHILD_TIMEOUT_S} s"
    if ran.returncode == 0:
        return ran.stdout.strip(), ""
    return None, (ran.stderr.strip().splitlines() or ["it printed no reason"])[-1]
