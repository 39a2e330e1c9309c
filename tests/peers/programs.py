"""The programs: how each is found, configured, started, and ended.

nginx, Caddy, HAProxy and LiteLLM's proxy pass requests on to the server at `target`. So each can be a node,
with a server behind it, and can stand in front of Fairlead.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from fairlead.base.config import demonstration_model
from peers import llama_cpp_server
from peers.backend import MODEL

START_S = 60.0
STOP_S = 10.0
BODY_BYTES = 1 << 20  # the largest request body that proxies let through
READ_TIMEOUT_S = 2  # how long proxies let a server be silent
MASTER_KEY = "sk-master"  # of LiteLLM's proxy
SLOTS = 2  # of llama.cpp's server


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@dataclass
class Program:
    """A program on a port. It can be started again after `stop`, on the same port.

    `key`: the API key that it requires; None: none.
    `log`: the file with its output.
    `start_s`: how long its start may take, in seconds.
    """

    command: Sequence[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    key: str | None = None
    process: subprocess.Popen[bytes] | None = None
    start_s: float = START_S

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until its port is open."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self.environment,
                start_new_session=True,  # so that its own processes end with it
            )
        deadline = time.monotonic() + self.start_s
        while not _is_open(self.port):
            assert self.process.poll() is None, self.log.read_text()
            if time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"{self.command[0]} did not open its port: {self.log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it and its processes, as an accident does."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_S)
            self.process = None


def _is_open(port: int) -> bool:
    with socket.socket() as connecting:
        connecting.settimeout(1)
        return connecting.connect_ex(("127.0.0.1", port)) == 0


# Where each is found -------------------------------------------------------------------------------------


@cache
def missing(name: str) -> str:
    """Return why the program cannot run here; empty if it can."""
    if name in ("nginx", "caddy", "haproxy"):
        return "" if shutil.which(name) else f"{name} is not installed"
    if name == "vllm":
        return "" if shutil.which(name) else "vllm is not installed"
    modules = {"llama.cpp": ("xllamacpp", "gguf"), "ollama": ("ollama",), "anthropic": ("anthropic",)}
    if name == "litellm":
        return "" if shutil.which("litellm") and _has_proxy() else "litellm[proxy] is not installed"
    absent = [module for module in modules.get(name, ()) if importlib.util.find_spec(module) is None]
    return f"{' and '.join(absent)} is not installed" if absent else ""


def _has_proxy() -> bool:
    """Return whether the environment of the command `litellm` has its proxy, too. It may be another one."""
    first = Path(str(shutil.which("litellm"))).read_text(errors="replace").partition("\n")[0]
    modules = ("fastapi", "backoff", "orjson")
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules})))"
    interpreter = first.removeprefix("#!").strip() or sys.executable
    return subprocess.run([interpreter, "-c", code], capture_output=True, check=False).returncode == 0


# How each is configured ------------------------------------------------------------------------------------

NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
{user}
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size {body_bytes};
    location / {{
      proxy_pass {target};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout {read_timeout_s}s;
    }}
  }}
}}
"""

CADDY = """
{{
  admin off
  auto_https off
}}
http://127.0.0.1:{port} {{
  request_body {{
    max_size {body_bytes}
  }}
  reverse_proxy {target} {{
    transport http {{
      response_header_timeout {read_timeout_s}s
      read_timeout {read_timeout_s}s
    }}
  }}
}}
"""

HAPROXY = """
global
  maxconn 256
defaults
  mode http
  option abortonclose
  timeout connect 5s
  timeout client 60s
  timeout server {read_timeout_s}s
listen all
  bind 127.0.0.1:{port}
  http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {body_bytes} }}
  server one {address}
"""


def nginx(folder: Path, target: str) -> Program:
    """Return nginx with the settings that streams need."""
    file = folder / "nginx.conf"
    command = ["nginx", "-c", str(file), "-p", str(folder), "-e", "stderr"]
    return _proxy(NGINX, file, command, target)


def caddy(folder: Path, target: str) -> Program:
    """Return Caddy."""
    file = folder / "Caddyfile"
    program = _proxy(CADDY, file, ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)], target)
    program.environment = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    return program


def haproxy(folder: Path, target: str) -> Program:
    """Return HAProxy."""
    file = folder / "haproxy.cfg"
    return _proxy(HAPROXY, file, ["haproxy", "-db", "-f", str(file)], target)


def _proxy(template: str, file: Path, command: list[str], target: str) -> Program:
    port = free_port()
    file.write_text(
        template.format(
            folder=file.parent,
            port=port,
            target=target,
            address=target.removeprefix("http://"),
            body_bytes=BODY_BYTES,
            read_timeout_s=READ_TIMEOUT_S,
            user="user root;" if os.geteuid() == 0 else "",
        )
    )
    return Program(command, port, file.with_suffix(".log"))


def litellm(folder: Path, target: str) -> Program:
    """Return LiteLLM's proxy, which repeats nothing and pauses nothing by itself."""
    port, file = free_port(), folder / "litellm.yaml"
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{target}/v1", "api_key": "unused"}
    settings = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "general_settings": {"master_key": MASTER_KEY},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "litellm_settings": {"num_retries": 0},
    }
    file.write_text(json.dumps(settings))
    command = ["litellm", "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    # Else it asks the internet for a table of prices first.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1", "DISABLE_ADMIN_UI": "True"}
    return Program(command, port, folder / "litellm.log", quiet, MASTER_KEY)


def llama_cpp(folder: Path, _target: str) -> Program:
    """Return llama.cpp's server with a tiny model of random weights."""
    model, port = folder / "tiny.gguf", free_port()
    llama_cpp_server.write_tiny_llama(model, demonstration_model())
    source = str(Path(llama_cpp_server.__file__))
    command = [sys.executable, source, str(model), str(port), str(SLOTS), "sk-llama"]
    return Program(command, port, folder / "llama_cpp.log", key="sk-llama")


def vllm(folder: Path, _target: str) -> Program:
    """Return vLLM's server on a CPU, with the model for long answers."""
    port, model = free_port(), _model_for_long_answers(folder)
    command = ["vllm", "serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-num-seqs", str(SLOTS), "--api-key", "sk-vllm"]
    command += ["--dtype", "float32", "--enforce-eager"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Program(command, port, folder / "vllm.log", quiet, "sk-vllm", start_s=300.0)


def _model_for_long_answers(folder: Path) -> Path:
    model = folder / "model"
    shutil.copytree(demonstration_model(), model)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 16_384}))
    return model


def fairlead(folder: Path, _target: str) -> Program:
    """Return another Fairlead with two slots, a queue of one job, and a model for long answers."""
    port, file, model = free_port(), folder / "node.yaml", _model_for_long_answers(folder)
    settings = {
        "apiKeys": [{"key": "sk-node", "user": "front", "trusted": True}],
        "models": {MODEL: {"path": str(model), "preload": True, "slots": SLOTS}},
        "queue": {"capacity": 1},
    }
    file.write_text(json.dumps(settings))
    file.chmod(0o600)
    command = [sys.executable, "-m", "fairlead", "serve", "--port", str(port), "--config", str(file)]
    return Program(command, port, folder / "node.log", {"NO_COLOR": "1"}, "sk-node")


# What each answers to a larger body. Caddy 2.6 passes on as much as it allows, cuts its own connection, and
# calls that a failure of the server; it closes the client's connection, too.
TOO_LARGE = {"nginx": 413, "caddy": 502, "haproxy": 413}
PROXIES: dict[str, Callable[[Path, str], Program]] = {"nginx": nginx, "caddy": caddy, "haproxy": haproxy}
ROUTERS = PROXIES | {"litellm": litellm}
ENGINES: dict[str, Callable[[Path, str], Program]] = {
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "fairlead": fairlead,
}
SHAPES = ("anthropic", "ollama")
