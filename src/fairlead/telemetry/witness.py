"""Reports each finished job: to the log, and to OpenTelemetry if a collector is configured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairlead.config import Config
from fairlead.request_timeline import RequestTimeline
from fairlead.telemetry.journal import Journal
from fairlead.telemetry.tenants import TenantNames
from fairlead.telemetry.traces import LoadTimes, open_traces

Witness = Callable[[RequestTimeline, LoadTimes], None]


@contextmanager
def witness_of(config: Config) -> Iterator[Witness]:
    """Yield the function to call with each timeline; afterwards send what is left, for some seconds at most.

    Its second argument says when the load of the job's model began and ended. Raises `ConfigError` if traces
    are configured and OpenTelemetry is not installed.
    """
    tenants = TenantNames(config)
    journal = Journal(tenants)
    traces = None if config.otlp_endpoint is None else open_traces(config.otlp_endpoint, tenants=tenants)

    def witness(journey: RequestTimeline, load: LoadTimes) -> None:
        journal(journey)
        if traces is not None:
            traces(journey, load)

    try:
        yield witness
    finally:
        if traces is not None:
            traces.close()
