"""The settings of the program, as frozen structs with defaults. Reads no file and no environment.

Names here are snake_case; a configuration file spells them in camelCase (`configfile` reads one).
"""

from fairlead.base.config.access import (
    NO_OPERATOR,
    ROLES,
    UNIX_PREFIX,
    ApiKey,
    CorsConfig,
    FlowControlConfig,
    KeyLimits,
    Role,
    is_loopback,
    lacks_operator,
)
from fairlead.base.config.cluster import ClusterConfig, ReplicasConfig
from fairlead.base.config.fleet import (
    GroupConfig,
    GroupSwap,
    HealthConfig,
    KeepSwap,
    LruSwap,
    MatrixSwap,
    NamedSwap,
    NodeConfig,
    SwapConfig,
)
from fairlead.base.config.lease import LeaseConfig
from fairlead.base.config.link import DispatcherConfig
from fairlead.base.config.models import (
    ANSWER_BYTES,
    MODEL_KINDS,
    AnyModelConfig,
    CommandConfig,
    DialectName,
    FiltersConfig,
    KvCacheConfig,
    ModelConfig,
    ModelKind,
    SpecialTokens,
    TimeoutsConfig,
    demonstration_model,
    runs_here,
)
from fairlead.base.config.selectors import SelectorConfig, SelectorSettings
from fairlead.base.config.server import (
    MOST_UPLOADS,
    Config,
    Limits,
    QueueConfig,
    ResponsesConfig,
    ServerConfig,
    UpstreamConfig,
)
from fairlead.base.config.spelling import ConfigError, Fault

__all__ = [
    "ANSWER_BYTES",
    "MODEL_KINDS",
    "MOST_UPLOADS",
    "NO_OPERATOR",
    "ROLES",
    "UNIX_PREFIX",
    "AnyModelConfig",
    "ApiKey",
    "ClusterConfig",
    "CommandConfig",
    "Config",
    "ConfigError",
    "CorsConfig",
    "DialectName",
    "DispatcherConfig",
    "Fault",
    "FiltersConfig",
    "FlowControlConfig",
    "GroupConfig",
    "GroupSwap",
    "HealthConfig",
    "KeepSwap",
    "KeyLimits",
    "KvCacheConfig",
    "LeaseConfig",
    "Limits",
    "LruSwap",
    "MatrixSwap",
    "ModelConfig",
    "ModelKind",
    "NamedSwap",
    "NodeConfig",
    "QueueConfig",
    "ReplicasConfig",
    "ResponsesConfig",
    "Role",
    "SelectorConfig",
    "SelectorSettings",
    "ServerConfig",
    "SpecialTokens",
    "SwapConfig",
    "TimeoutsConfig",
    "UpstreamConfig",
    "demonstration_model",
    "is_loopback",
    "lacks_operator",
    "runs_here",
]
