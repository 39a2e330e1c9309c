"""The wires of the composition: what one part gets from another. A server with any of them cut is a mutant.

A wire is an argument given by its name, which is left out; an entry of a mapping that is an argument; or a
statement that only calls something, or that sets an attribute of another object, which is left out. All are
found in the source, so that a new one needs no mutant that somebody writes. Arguments without a default need
no test: a server without one of them does not start.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from settings.mutants import changed_function, replaced_in_product

SEVERAL_FRONTS = (
    "fleet_state",
    "fleet_view",
    "front_nodes",
    "owned_processes",
    "shared_counts",
    "supervised_process",
)
PROCESSES = ("child", "dispatcher_role", "front_role", "supervisor")
MODULES = (
    "fairlead.server.app",
    *(f"fairlead.distributed.supervisor.{name}" for name in SEVERAL_FRONTS),
    *(f"fairlead.server.processes.{name}" for name in PROCESSES),
)
# What a simulated server does not have, by function or as "function: text".
_SUPERVISED = "fairlead.server.processes.supervisor:supervise"
UNSEEN = {
    **dict.fromkeys(
        (
            "fairlead.server.app:run",
            "fairlead.server.processes.child:main",
            (
                "fairlead.server.processes.child:live: logs.configure(json=config.log_json, "
                "level=config.log_level)"
            ),
            "fairlead.server.processes.child:live: logs.configure(json=config.log_json)",
            "fairlead.server.processes.child:live: logs.configure(level=config.log_level)",
            "fairlead.server.processes.supervisor:run",
            f"{_SUPERVISED}: replace(port=port)",
            (
                "fairlead.server.processes.child:_report: "
                "control.CannotStart(is_bad_config=isinstance(cause, ConfigError))"
            ),
            "fairlead.server.app:serve: freeze()",
            "fairlead.server.processes.dispatcher_role:DispatcherRole._load: freeze()",
            "fairlead.server.processes.front_role:FrontRole.run: freeze()",
        ),
        "the interpreter, the log, the folder, the port, the signals and the exit code of a real process",
    ),
    **dict.fromkeys(
        (
            "fairlead.server.processes.child:NoSupervisor.send",
            "fairlead.server.processes.child:NoSupervisor.stop",
            "fairlead.server.processes.child:NoSupervisor.drain",
            "fairlead.server.processes.child:NoSupervisor._keep",
            (
                "fairlead.server.processes.dispatcher_role:DispatcherRole.__init__: "
                "FrontServer(may_send=may_send)"
            ),
        ),
        "processes on several machines, and their lease: tests/e2e/test_fronts_on_machines.py",
    ),
    **dict.fromkeys(
        (
            "fairlead.server.app:Composition.prepare: refuse_without_ray(self._config)",
            (
                "fairlead.server.app:Composition.running: nodes.start_soon(keep_running, 'cluster', "
                "run_cluster, "
                "self._config.cluster, self.fleet, self.dispatcher)"
            ),
            f"{_SUPERVISED}: refuse_without_ray(config)",
            "fairlead.server.processes.dispatcher_role:DispatcherRole._start_cluster",
            (
                "fairlead.server.processes.dispatcher_role:DispatcherRole.run: await "
                "self._start_cluster(self._cluster)"
            ),
        ),
        "a Ray cluster: tests/distributed/ray",
    ),
    **dict.fromkeys(
        (
            "fairlead.server.app:ServerObserver.__init__",
            "fairlead.server.app:serve: task_status.started(url)",
            "fairlead.server.app:Composition.__init__: Dispatcher(random=random)",
            "fairlead.server.app:Composition.running: Application(bypasses_quart=bypasses_quart)",
        ),
        "what only tests and other servers use",
    ),
    **dict.fromkeys(
        (
            "fairlead.server.app:serve: signals.cancel_scope.cancel()",
            "fairlead.server.app:Composition._services: Services(draining=self.draining.is_set)",
            "fairlead.server.processes.child:SupervisorLink.__init__: FrameLink(name='supervisor')",
            "fairlead.server.processes.child:SupervisorLink.serve: self._received.clear()",
            "fairlead.server.processes.child:_report: await trio.sleep_forever()",
            (
                "fairlead.server.processes.dispatcher_role:_find_files: "
                "trio.to_thread.run_sync(abandon_on_cancel=True)"
            ),
            "fairlead.distributed.supervisor.front_nodes:FrontNodes.update: handle.close()",
        ),
        "another part does the same, or only memory and time are saved",
    ),
    **dict.fromkeys(
        (
            "fairlead.server.app:Composition._services: Services(problems=lambda: fleet.problems)",
            "fairlead.server.processes.child:SupervisorLink.serve: handle(message)",
            "fairlead.distributed.supervisor.fleet_view:FleetView.output: InvalidRequest(param='model')",
            (
                "fairlead.distributed.supervisor.fleet_view:FleetView._read_output: output.end = "
                "max(output.end, begin)"
            ),
        ),
        "not tested: a stuck process that is not killed, a reload at a start, thousands of lines at once",
    ),
}
# What only a terminal, a real process or its log shows.
SHOWN = frozenset({"logger", "announce", "log_failure", "nursery.cancel_scope", "shutil", "sock"})


class Wire(NamedTuple):
    """One wire: the function that has it, its place among the function's wires, and its source."""

    function: str
    place: int
    text: str

    @property
    def name(self) -> str:
        """Its name in the tests' output; unique."""
        return f"{self.function}#{self.place}: {self.text}"

    @property
    def unseen(self) -> set[str]:
        """The entries of `UNSEEN` that concern it."""
        return {self.function, f"{self.function}: {self.text}"} & UNSEEN.keys()

    @property
    def is_of_fronts(self) -> bool:
        """Whether only a server with several fronts has it."""
        return self.function.startswith(("fairlead.distributed.supervisor", "fairlead.server.processes"))


def wires() -> Iterator[Wire]:
    """Yield the wires that scenarios can show."""
    return (wire for wire in all_wires() if not wire.unseen)


def all_wires() -> Iterator[Wire]:
    """Yield all wires."""
    for name in MODULES:
        module = import_module(name)
        for path, tree in _functions(module):
            function = f"{name}:{path}"
            for place, (text, _) in enumerate(_cuts(tree)):
                yield Wire(function, place, text)


def cut(wire: Wire) -> AbstractContextManager[None]:
    """Run the product without this wire."""

    def without(source: str) -> str:
        tree = ast.parse(source)
        (_, cut_it) = list(_cuts(tree.body[0]))[wire.place]
        cut_it()
        return ast.unparse(tree)

    return replaced_in_product(wire.function, lambda original: changed_function(original, without))


def _functions(module: ModuleType) -> Iterator[tuple[str, ast.AST]]:
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            for inner, part in list(vars(value).items()):
                function = part.fget if isinstance(part, property) else part
                if inspect.isfunction(function) and not isinstance(part, staticmethod | classmethod):
                    suffix = ".fget" if isinstance(part, property) else ""
                    yield f"{name}.{inner}{suffix}", _parsed(function)
        elif inspect.isfunction(value):
            yield name, _parsed(value)


def _parsed(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def _cuts(tree: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each wire of a function, with what cuts it, in the order of the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not _is_shown(node):
            yield from _arguments(node)
        for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(statements, list):
                yield from _statements(statements)


def _arguments(call: ast.Call) -> Iterator[tuple[str, Callable[[], None]]]:
    callee = ast.unparse(call.func)
    for keyword in call.keywords:
        if keyword.arg is not None:
            text = f"{callee}({ast.unparse(keyword)})"
            yield text, lambda keyword=keyword: call.keywords.remove(keyword)
        if isinstance(keyword.value, ast.Dict):
            yield from _entries(callee, keyword.value)


def _entries(callee: str, mapping: ast.Dict) -> Iterator[tuple[str, Callable[[], None]]]:
    def remove(key: ast.expr | None, value: ast.expr) -> None:
        place = mapping.values.index(value)
        del mapping.keys[place], mapping.values[place]

    for key, value in zip(mapping.keys, mapping.values, strict=True):
        shown = "**" if key is None else f"{ast.unparse(key)}: "
        yield f"{callee}({{{shown}{ast.unparse(value)}}})", lambda key=key, value=value: remove(key, value)


def _statements(statements: list[ast.stmt]) -> Iterator[tuple[str, Callable[[], None]]]:
    def drop(statement: ast.stmt) -> None:
        statements[statements.index(statement)] = ast.Pass()

    for statement in statements:
        match statement:
            case ast.Expr(ast.Call() as call) | ast.Expr(ast.Await(ast.Call() as call)):
                is_wire = not _is_shown(call) and ast.unparse(call.func) != "super().__init__"
            case ast.Assign([ast.Attribute(owner)], _):
                is_wire = not (isinstance(owner, ast.Name) and owner.id == "self")
            case _:
                is_wire = False
        if is_wire:
            yield ast.unparse(statement), lambda statement=statement: drop(statement)


def _is_shown(call: ast.Call) -> bool:
    callee = ast.unparse(call.func)
    return any(callee == name or callee.startswith(f"{name}.") for name in SHOWN)
