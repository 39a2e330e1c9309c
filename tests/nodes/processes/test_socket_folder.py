"""The folder of a server's sockets: who removes it, and when."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fairlead.nodes.processes import socket_folder as module
from fairlead.nodes.processes.socket_folder import LOCK, PREFIX, socket_folder

SERVER = """
import sys, time
from fairlead.nodes.processes.socket_folder import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folder_is_removed_after_kill_9_by_the_next_start_and_not_before(parent):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        folder = Path(server.stdout.readline().strip())
        (folder / "dispatcher.sock").touch()
        with socket_folder() as other:
            assert folder.is_dir(), "its server runs"
        assert not Path(other).exists()
        os.kill(server.pid, signal.SIGKILL)
    assert folder.is_dir()
    with socket_folder() as other:
        assert list(parent.iterdir()) == [Path(other)]


def test_only_abandoned_folders_of_this_user_are_removed(parent, monkeypatch):
    being_made, mine = parent / f"{PREFIX}new", parent / f"{PREFIX}mine"
    elsewhere, link = parent / "elsewhere", parent / f"{PREFIX}link"
    for folder in (being_made, mine, elsewhere):
        folder.mkdir()
    (elsewhere / LOCK).touch()
    (mine / LOCK).touch()
    link.symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
        with socket_folder():
            assert mine.is_dir()
    with socket_folder():
        assert not mine.exists()
        assert being_made.is_dir()
        assert link.is_symlink()
        assert (elsewhere / LOCK).exists()
