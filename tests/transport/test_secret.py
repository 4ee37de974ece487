"""The file of a cluster's secret: who may read it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.transport.secret import create_secret, is_private, read_secret

ROOT, USER, OTHER = 0, 1000, 1001


@pytest.mark.parametrize(
    ("mode", "owner", "user", "expected"),
    [
        (0o600, USER, USER, True),
        (0o400, USER, USER, True),
        (0o640, USER, USER, False),
        (0o604, USER, USER, False),
        (0o440, ROOT, USER, True),  # a secret of Kubernetes with defaultMode 0400 and fsGroup
        (0o640, ROOT, USER, True),
        (0o660, ROOT, USER, False),
        (0o444, ROOT, USER, False),  # one with fsGroup and a defaultMode for everybody
        (0o450, ROOT, USER, False),
        (0o440, ROOT, ROOT, False),
        (0o440, OTHER, USER, False),
    ],
)
def test_who_may_read_the_file(mode: int, owner: int, user: int, expected: bool) -> None:
    assert is_private(mode, owner, user) is expected


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of root")
def test_a_group_may_read_a_file_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes mounts it: a link to a file of root that the pod's group may read."""
    file, link = tmp_path / "..data", tmp_path / "cluster.secret"
    secret = create_secret(file)
    file.chmod(0o440)
    link.symlink_to(file.name)
    with pytest.raises(ConfigError, match="mode 440"):
        read_secret(link, "--secret-file")
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    assert read_secret(link, "--secret-file") == secret
    file.chmod(0o444)
    with pytest.raises(ConfigError, match="mode 444"):
        read_secret(link, "--secret-file")


def test_a_place_where_no_file_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("none/secret", "No such file or directory"), ("file/secret", "Not a directory")):
        with pytest.raises(ConfigError, match=f"^--cluster-secret-file: .*{place}: {why}$"):
            create_secret(tmp_path / place)
