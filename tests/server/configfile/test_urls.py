"""URLs of other servers: where their routes are, which are refused, and what of them is not shown."""

import pytest

from fairlead.base.config import CommandConfig, ConfigError, NodeConfig
from fairlead.base.config.urls import roots_of, secrets_in, shown_url
from fairlead.server.configfile.sections import Peer


@pytest.mark.parametrize(
    ("path", "api", "server"),
    [
        ("", "/v1", ""),
        ("/", "/v1", ""),
        ("/v1", "/v1", ""),
        ("/v1/", "/v1", ""),
        ("/team-a", "/team-a/v1", "/team-a"),
        ("/openai", "/openai/v1", "/openai"),  # Groq, Azure's newer API
        ("/openai/v1", "/openai/v1", "/openai"),
        ("/api/v1", "/api/v1", "/api"),  # OpenRouter
        ("/api/paas/v4", "/api/paas/v4", "/api/paas"),  # GLM
        ("/api/v3/", "/api/v3", "/api"),  # Volcengine
        ("/v1beta/openai/", "/v1beta/openai", ""),  # Gemini
        ("/v1/openai", "/v1/openai", ""),  # DeepInfra
        ("/v1/projects/p/locations/l/endpoints/openapi",) * 2 + ("",),  # Vertex AI
        ("/v1/account/gateway/compat",) * 2 + ("",),  # Cloudflare's gateway
        ("/client/v4/accounts/a/ai/v1", "/client/v4/accounts/a/ai/v1", "/client/v4/accounts/a/ai"),
        ("/api/anthropic", "/api/anthropic/v1", "/api/anthropic"),
        ("/openai/deployments/gpt-4o",) * 2 + ("/openai/deployments/gpt-4o",),  # Azure
        ("/api/v1/namespaces/n/services/s/proxy", "/api/v1/namespaces/n/services/s/proxy/v1", None),
        ("/v100", "/v100", ""),
        ("/v1x", "/v1x/v1", "/v1x"),
    ],
)
def test_routes_are_below_the_root_that_the_url_has(path, api, server):
    assert roots_of(path) == (path.rstrip("/") if server is None else server, api)


@pytest.mark.parametrize(
    ("api_path", "api"), [("/", "/inference"), ("/v3", "/inference/v3"), ("/v3/", "/inference/v3")]
)
def test_path_of_the_api_may_be_set(api_path, api):
    assert roots_of("/inference/", api_path) == ("/inference", api)


def faults(make, **settings):
    """Return the messages of the refusal of settings."""
    with pytest.raises(ConfigError) as refused:
        make(**settings)
    return [fault.message for fault in refused.value.faults]


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("http://h:1/v1/chat/completions", "http://h:1/v1"),
        ("http://h/v1/chat/completions/", "http://h/v1"),
        ("https://h/api/paas/v4/chat/completions", "https://h/api/paas/v4"),
        ("https://h/v1/messages", "https://h/v1"),
        ("https://h/v1/messages/count_tokens", "https://h/v1"),
        ("https://h/v1/models", "https://h/v1"),
        ("https://h/v1/audio/speech", "https://h/v1"),
        ("https://h/inference/chat/completions", "https://h/inference with apiPath: /"),
        ("https://h/chat/completions", "https://h with apiPath: /"),
        ("http://h:11434/api/chat", "http://h:11434"),
        ("http://h:11434/api/embeddings", "http://h:11434"),
        ("http://h/health", "http://h"),
        (
            "https://h/openai/deployments/d/chat/completions?api-version=1&key=SECRET",
            "https://h/openai/deployments/d?…",
        ),
        ("dns+http://h/v1/completions", "http://h/v1"),
    ],
)
def test_url_of_a_whole_route_is_refused_with_what_to_write(url, instead):
    (message,) = faults(NodeConfig, id="n", url=url, models=("m",))
    assert message.endswith(f"; write {instead}"), message
    assert "SECRET" not in message


@pytest.mark.parametrize("url", ["http://h/models", "http://h/messages/", "http://h/v1/team/score"])
def test_prefix_that_is_named_like_a_route_is_none(url):
    assert NodeConfig(id="n", url=url, models=("m",)).url == url


def test_peers_and_commands_may_not_have_whole_routes_either():
    peer = Peer("http://h/v1/chat/completions", ("m",))
    assert [fault.path for fault in peer.contradictions()] == [("proxy",)]
    whole = "http://localhost:${PORT}/chat/completions"
    (message,) = faults(CommandConfig, name="c", cmd=("x",), proxy=whole, port=5800)
    assert message.endswith("; write http://localhost:${PORT} in nodes, with apiPath: /")


@pytest.mark.parametrize(
    "url", ["http://h/a b", "http://ü", "http://h/v1#part", "http://h/v1?key=a b", "http://u:p@h"]
)
def test_url_that_no_request_could_have_is_refused(url):
    (message,) = faults(NodeConfig, id="n", url=url)
    assert message.startswith("must be a URL")


@pytest.mark.parametrize("api_path", ["v3", "", "/a b", "/a?b=c", "/#"])
def test_path_of_an_api_that_no_request_could_have_is_refused(api_path):
    assert faults(NodeConfig, id="n", url="http://h", api_path=api_path)


def test_query_of_a_url_is_not_shown():
    url = "http://h/openai?api-version=2026-01-01&key=SECRET"
    assert shown_url(url) == "http://h/openai"
    hidden = secrets_in(url.partition("?")[2], "sk-12345678")
    assert set(hidden) == {"sk-12345678", "key=SECRET", "api-version=2026-01-01", "2026-01-01"}
