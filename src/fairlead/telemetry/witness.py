"""Who is told of each job when it is over: the log, and OpenTelemetry if there is a collector for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairlead.config import Config
from fairlead.journey import Journey
from fairlead.telemetry.journal import Journal
from fairlead.telemetry.tenants import TenantNames
from fairlead.telemetry.traces import LoadTimes, open_traces

Witness = Callable[[Journey, LoadTimes], None]


@contextmanager
def witness_of(config: Config) -> Iterator[Witness]:
    """Yield what to call with each journey; afterwards send what is left, for some seconds at most.

    It is also given when the load of the journey's model began and ended. Raises `ConfigError` if it cannot
    be done as the configuration wants it.
    """
    tenants = TenantNames(config)
    journal = Journal(tenants)
    traces = None if config.otlp_endpoint is None else open_traces(config.otlp_endpoint, tenants=tenants)

    def witness(journey: Journey, load: LoadTimes) -> None:
        journal(journey)
        if traces is not None:
            traces(journey, load)

    try:
        yield witness
    finally:
        if traces is not None:
            traces.close()
