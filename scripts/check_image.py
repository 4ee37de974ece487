"""Starts an image of buildah, asks its server and stops it: `python scripts/check_image.py [NAME]`.

It needs root and buildah, and no container runtime. The command runs in the image's files, as its user, with
its environment alone, and as the first process of a PID namespace. deploy/server.yaml is mounted as
compose.yaml does. The server must answer /live, /health and /v1/models. After SIGTERM its exit code is 0.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = Path(__file__).parent.parent / "deploy" / "server.yaml"
PATHS = ("/live", "/health", "/v1/models")
ENTER = """
set -e
root=$1 user=$2 settings=$3
shift 3
for folder in /dev /sys; do mount --rbind "$folder" "$root$folder"; done
mount -t proc proc "$root/proc"
mkdir -p "$root/etc/moesaic"
touch "$root/etc/moesaic/server.yaml"
mount --bind "$settings" "$root/etc/moesaic/server.yaml"
exec chroot --userspec "$user" --groups "" "$root" /usr/bin/env -i "$@"
"""


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    name = arguments[0] if arguments else "moesaic"
    if shutil.which("buildah") is None:
        print("check_image: buildah is missing (Debian: apt install buildah)", file=sys.stderr)
        return 2
    try:
        container = buildah("from", "--pull-never", name)
    except subprocess.CalledProcessError:  # buildah has said why
        print(f"check_image: no image {name}; deploy/build_image {name} builds it", file=sys.stderr)
        return 2
    try:
        config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
        statuses, code = ask(Path(buildah("mount", container)), config)
    finally:
        buildah("rm", container)
    print(f"check_image: {config['User']}, {statuses}, exit code {code}")
    return 0 if code == 0 and set(statuses.values()) == {200} else 1


def buildah(*words: str) -> str:
    """What a command of buildah prints."""
    return subprocess.run(["buildah", *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def ask(root: Path, config: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The status of each path of the server in an image, and its exit code after SIGTERM."""
    command = [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"),
        *(str(root), config["User"], str(SETTINGS), "HOME=/home/moesaic", *config["Env"]),
        *(*config["Entrypoint"], *config["Cmd"], "--port", "0", "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = json.loads(process.stdout.readline())["url"].rpartition(":")[2]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            statuses = {}
            for path in PATHS:
                with opener.open(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
                    statuses[path] = response.status
        finally:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:  # unshare passes no signal on
                subprocess.run(["kill", f"-{signal.SIGTERM}", child], check=True)
    return statuses, process.returncode


if __name__ == "__main__":
    raise SystemExit(main())
