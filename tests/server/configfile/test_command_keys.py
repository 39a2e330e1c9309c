"""The key of a command's server is found in its command line or its environment."""

import shlex

import pytest

from fairlead.base.config.command_keys import CommandKeys, keys_of


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("llama-server --port 1 --api-key needed", ["needed"]),
        ("llama-server --api-key=needed --port 1", ["needed"]),
        ("llama-server --api-key first,second --api-key third", ["first", "second", "third"]),
        ("llama-server --api-key ',\"a,b\",c'", ["a,b", "c"]),
        ("vllm serve m --api_key token", ["token"]),
        ("sh -c 'exec llama-server --api-key inner'", ["inner"]),
        ("sh -c 'exec llama-server --api-key $KEY'", []),
        ("env LLAMA_API_KEY=a llama-server", ["a"]),
        ("docker run -e LLAMA_API_KEY=a --env=VLLM_API_KEY=b image", ["a", "b"]),
        ("llama-server --api-key", []),
        ("llama-server --api-key-prefix x", []),
        ("sh -c 'llama-server --api-key \"'", []),
    ],
)
def test_key_of_a_command_is_read_from_its_line(command, keys):

    assert keys_of(shlex.split(command), {}) == CommandKeys(tuple(keys))


def test_keys_of_the_line_come_before_those_of_the_environment():
    found = keys_of(("x", "--api-key-file", "keys.txt", "--api-key", "a"), {"LLAMA_API_KEY": "b,c"})
    assert found == CommandKeys(("a", "b", "c"), "keys.txt")
