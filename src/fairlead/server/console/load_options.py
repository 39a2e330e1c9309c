"""The options of `fairlead bench`: their names, ranges and help texts."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators

from fairlead.base.config import ConfigError
from fairlead.server.console.options import AtLeastOne, AtLeastZero

if TYPE_CHECKING:
    from fairlead.server.load.generator import Options

Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Seconds = Annotated[float, Parameter(validator=validators.Number(gt=0, lt=1e9))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The load: which requests, how many, and how many at a time.

    Parameters
    ----------
    endpoint
        Kind of requests to send.
    streams
        Number of concurrent clients. The levels of a comma-separated list run one after the other.
    requests
        Number of requests per level. Default: four per stream.
    warmup
        Number of requests before each level that are not measured. Default: one per stream.
    prompt_tokens
        Length of the prompts, in tokens, as counted by the server's /tokenize.
    output_tokens
        Length of the answers, in tokens.
    ignore_eos
        Request answers that do not end early.
    tenants
        Spread the requests over this many `user` names; 0 sends none.
    duration
        Seconds after which a level starts no more requests.
    timeout
        Maximum time of one answer, in seconds.
    seed
        Seed of the random prompts.
    """

    endpoint: Literal["chat", "completions"] = "chat"
    streams: str = "1,8,32"
    requests: AtLeastOne = None
    warmup: AtLeastZero = None
    prompt_tokens: Count = 128
    output_tokens: Count = 64
    ignore_eos: bool = True
    tenants: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0
    duration: Seconds = 120.0
    timeout: Seconds = 600.0
    seed: int = 0

    def options(self, url: str, model: str) -> "Options":
        """Return the generator's `Options`. Raises `ConfigError`."""
        from fairlead.server.load.generator import Options

        options = asdict(self) | {"streams": _levels(self.streams)}
        duration_s, timeout_s = options.pop("duration"), options.pop("timeout")
        return Options(url=url, model=model, duration_s=duration_s, timeout_s=timeout_s, **options)


def _levels(streams: str) -> tuple[int, ...]:
    try:
        levels = tuple(map(int, streams.split(",")))
    except ValueError:
        levels = (0,)
    if min(levels) < 1:
        raise ConfigError(f"--streams: must be numbers from 1 on, separated by commas, not {streams!r}")
    return levels
