"""A warning is given if other users of the machine can read the API keys in a file."""

import pytest

from fairlead.server.configfile import Reading

MODEL = "models: {m: {path: small}}\n"


def is_warned_about(reading: Reading) -> bool:
    return any("chmod 600" in remark for remark in reading.remarks)


@pytest.mark.parametrize(
    "text",
    [
        "apiKeys: [sk-1]",
        "apiKeys: [{key: sk-1, user: ana}]",
        "apiKeys: [${env.KEY}, {key: sk-1}]",
        "nodes: [{id: a, url: 'http://a', models: [x], apiKey: sk-1}]",
        "peers: {a: {proxy: 'http://a', models: [x], apiKey: sk-1}}",
        "macros: {secret: sk-1}\napiKeys: ['${secret}']",
        "nodes: [&one {id: a, url: 'http://a', models: [x], apiKey: sk-1}]",
        r'apiKeys: ["\u0073k-1"]',
        "nodes: [{id: a, url: 'http://a?api-version=1&key=sk-1', models: [x]}]",
    ],
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_warning_for_keys_in_a_file_that_others_can_read(file, text, mode):
    file.environment["KEY"] = "sk-2"
    file.path.touch()
    file.path.chmod(mode)
    (remark,) = file.reading(MODEL + text).remarks
    expected = f"other users of this machine can read its API keys (mode {mode:04o}): chmod 600 {file.path}"
    assert expected == remark


@pytest.mark.parametrize(
    "text",
    [
        "",
        "apiKeys: ['${env.KEY}', {key: '${env.KEY_2}'}]",
        "nodes: [{id: a, url: 'http://a', models: [x], apiKey: '${env.KEY}'}]",
        "nodes: [{id: a, url: 'http://a', models: [x]}]",
        "peers: {a: {proxy: 'http://a', models: [x], apiKey: '${env.KEY}'}}",
        "macros: {secret: '${env.KEY}'}\napiKeys: ['${secret}']",
        "apiKeys: ['sk-${env.KEY}']",
        "nodes: [{id: a, url: 'http://a?api-version=1&key=${env.KEY}', models: [x]}]",
    ],
)
def test_no_warning_for_keys_that_are_not_in_the_file(file, text):
    file.environment |= {"KEY": "1", "KEY_2": "2"}
    file.path.touch()
    file.path.chmod(0o644)
    assert not is_warned_about(file.reading(MODEL + text))


@pytest.mark.parametrize(
    ("settings", "is_in_file"),
    [
        ("cmd: '${PORT} --api-key sk-1'", True),
        ("cmd: '${PORT}', env: [LLAMA_API_KEY=sk-1]", True),
        ("cmd: '${PORT}', apiKey: sk-1", True),
        ("cmd: '${PORT} --api-key ${env.KEY}'", False),
        ("cmd: '${PORT}', env: ['LLAMA_API_KEY=${env.KEY}']", False),
    ],
)
def test_key_of_a_command_is_one_of_the_files_keys(file, settings, is_in_file):
    file.environment["KEY"] = "sk-2"
    file.path.touch()
    file.path.chmod(0o644)
    assert is_warned_about(file.reading(f"models: {{m: {{{settings}}}}}")) == is_in_file


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o622])
def test_no_warning_for_keys_that_only_their_owner_can_read(file, mode):
    file.path.touch()
    file.path.chmod(mode)
    assert not is_warned_about(file.reading(f"{MODEL}apiKeys: [sk-1]"))


def test_file_name_in_the_warning_is_quoted_for_the_shell(file):
    file.path = file.path.with_name("a file.yaml")
    file.path.touch()
    file.path.chmod(0o644)
    (remark,) = file.reading(f"{MODEL}apiKeys: [sk-1]").remarks
    assert remark.endswith(f"chmod 600 '{file.path}'")


def test_no_warning_on_systems_without_file_modes(file, monkeypatch):
    monkeypatch.setattr("fairlead.server.configfile.read.HAS_MODES", False)
    assert not is_warned_about(file.reading(f"{MODEL}apiKeys: [sk-1]"))
