"""The manifests in deploy/kubernetes: by the schemas of Kubernetes, and by what moesaic itself has."""

from __future__ import annotations

import base64
import copy
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml

import moesaic
from moesaic import LLM, SamplingParams
from moesaic.commands import cli, join, serve
from moesaic.commands.options import Join
from moesaic.server.guard import OPEN_PATHS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAY: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OBJECTS: list[dict[str, Any]] = [
    one for name in FILES for one in yaml.safe_load_all((FOLDER / name).read_text())
]
SETS = [one for one in OBJECTS if one["kind"] == "StatefulSet"]
JOINING = [one for one in SETS if one["metadata"]["name"] != "moesaic-server"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SCHEMAS: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "kubernetes_schemas.json").read_text())


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(one: dict[str, Any]) -> dict[str, Any]:
    """The pod that a StatefulSet starts."""
    found: dict[str, Any] = one["spec"]["template"]["spec"]
    return found


def container(one: dict[str, Any]) -> dict[str, Any]:
    """The only container of a StatefulSet's pod."""
    [found] = pod(one)["containers"]
    assert isinstance(found, dict)
    return found


def ports(one: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(one).get("ports", ())}


def name_of(one: dict[str, Any]) -> str:
    return str(one["metadata"]["name"])


def complaints(one: dict[str, Any]) -> list[str]:
    """What the schema of its kind has against an object."""
    schema = {"$ref": f"#/$defs/{SCHEMAS['kinds'][one['kind']]}", "$defs": SCHEMAS["$defs"]}
    return [str(error) for error in jsonschema_rs.validator_for(schema).iter_errors(one)]


def served(monkeypatch: pytest.MonkeyPatch, arguments: list[str] | None = None) -> tuple[Any, ...]:
    """The settings with which the server's pod would serve, by its arguments or by these."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "run", lambda *given: found.append(given) or 0)
    assert cli.main(arguments or container(named("StatefulSet", "moesaic-server"))["args"]) == 0
    return found[0]


def joined(one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Join:
    """The settings with which this pod would join."""
    found: list[Join] = []
    monkeypatch.setattr(join, "run", lambda options, as_json: found.append(options) or 0)
    assert cli.main(container(one)["args"]) == 0
    return found[0]


@pytest.mark.parametrize("one", OBJECTS, ids=name_of)
def test_every_object_keeps_the_schema_of_its_kind(one: dict[str, Any]) -> None:
    assert complaints(one) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "livenessProbes"), {}),
        (("spec", "template", "spec", "containers", 0, "args"), "serve demo"),
        (("spec", "replicas"), "one"),
        (("spec", "serviceNames"), "moesaic-cluster"),
        (("apiVersion",), "v1"),
    ],
)
def test_the_schemas_refuse_mistakes(path: tuple[Any, ...], value: object) -> None:
    one = copy.deepcopy(named("StatefulSet", "moesaic-server"))
    place: Any = one
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert len(complaints(one)) == 1


def test_the_server_listens_where_services_and_probes_look(monkeypatch: pytest.MonkeyPatch) -> None:
    one = named("StatefulSet", "moesaic-server")
    worker, cluster, server, *_ = served(monkeypatch)
    assert one["spec"]["replicas"] == 1, "two servers would be two clusters"
    assert (worker.model.model, server.host, cluster.min_replicas) == ("demo", "0.0.0.0", 2)
    assert ports(one) == {"http": server.port, "cluster": int(cluster.cluster_address.rpartition(":")[2])}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container(one)[probe]["httpGet"]
        assert asked["port"] == "http" and asked["path"] in OPEN_PATHS
    assert container(one)["readinessProbe"]["httpGet"]["path"] == "/health"


def test_services_find_their_pods() -> None:
    labels = {name_of(one): one["spec"]["template"]["metadata"]["labels"] for one in SETS}
    server = named("StatefulSet", "moesaic-server")

    def chosen(service: dict[str, Any]) -> set[str]:
        return {name for name, has in labels.items() if service["spec"]["selector"].items() <= has.items()}

    api, cluster = named("Service", "moesaic-api"), named("Service", "moesaic-cluster")
    assert chosen(api) == {"moesaic-server"} and chosen(cluster) == set(labels)
    assert cluster["spec"]["clusterIP"] == "None" and cluster["spec"]["publishNotReadyAddresses"]
    assert {port["targetPort"] for one in (api, cluster) for port in one["spec"]["ports"]} == set(
        ports(server)
    )
    assert cluster["spec"]["ports"][0]["port"] == ports(server)["cluster"]
    for one in SETS:
        assert one["spec"]["serviceName"] == "moesaic-cluster"
        assert one["spec"]["selector"]["matchLabels"] == labels[name_of(one)] == one["metadata"]["labels"]
        assert pod(one)["enableServiceLinks"] is False, "variables of services would be taken for settings"


def test_expert_servers_leave_one_at_a_time() -> None:
    budget = named("PodDisruptionBudget", "moesaic-expert-server")["spec"]
    pods = named("StatefulSet", "moesaic-expert-server")["spec"]
    assert budget["selector"] == pods["selector"] and budget["maxUnavailable"] == 1 < pods["replicas"]
    assert all(one["spec"]["minReadySeconds"] >= 60 for one in JOINING)


@pytest.mark.parametrize("one", JOINING, ids=name_of)
def test_each_joins_the_server_in_its_role(one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = joined(one, monkeypatch)
    server = named("StatefulSet", "moesaic-server")
    first = f"moesaic-server-0.{server['spec']['serviceName']}:{ports(server)['cluster']}"
    assert options.address == first
    assert f"moesaic-{options.role}" == name_of(one) and options.model is None
    assert container(one)["resources"]["requests"]["cpu"] == str(options.threads)
    assert one["spec"]["podManagementPolicy"] == "Parallel", "none waits for another one"


def test_the_server_has_a_core_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, cluster, *_ = served(monkeypatch)
    processes = cluster.attention_workers + cluster.expert_servers + cluster.prefill_workers
    asked = container(named("StatefulSet", "moesaic-server"))["resources"]["requests"]
    assert asked["cpu"] == str(worker.model.threads * processes)


@pytest.mark.parametrize("one", SETS, ids=name_of)
def test_the_secret_is_a_file_that_only_the_pod_can_read(
    one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transport/secret.py accepts mode 440 of a file of root, which fsGroup makes of 0400."""
    options: Any = joined(one, monkeypatch) if one in JOINING else served(monkeypatch)[1]
    file = Path(options.secret_file if one in JOINING else options.cluster_secret_file)
    [mount] = [each for each in container(one)["volumeMounts"] if each["mountPath"] == str(file.parent)]
    [volume] = [each for each in pod(one)["volumes"] if each["name"] == mount["name"]]
    made = {each["name"]: each for each in OVERLAY["secretGenerator"]}
    assert mount["readOnly"] is True and volume["secret"]["defaultMode"] == 0o400
    assert made[volume["secret"]["secretName"]]["files"] == [file.name]
    keys = made["moesaic-keys"]
    for variable in container(one).get("env", ()):
        assert variable["name"] in ("MOESAIC_API_KEY", "MOESAIC_ADMIN_KEY")
        source = variable["valueFrom"]["secretKeyRef"]
        assert (source["name"], source["key"]) == (keys["name"], variable["name"])
    assert one in JOINING or keys["envs"] == ["keys.env"]


def test_no_secret_is_kept() -> None:
    assert {one["kind"] for one in OBJECTS} & {"Secret", "ConfigMap"} == set()
    made = [
        file for one in OVERLAY["secretGenerator"] for file in (*one.get("files", ()), *one.get("envs", ()))
    ]
    ignored = (ROOT / ".gitignore").read_text().split()
    unsent = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    for file in made:
        assert f"*{Path(file).suffix}" in ignored or f"/deploy/kubernetes/{file}" in ignored
        assert f"**/*{Path(file).suffix}" in unsent
        assert not (FOLDER / file).exists()


@pytest.mark.parametrize("one", SETS, ids=name_of)
def test_pods_run_as_the_user_of_the_image_on_what_they_mount(one: dict[str, Any]) -> None:
    user = int(re.findall(r"useradd --uid (\d+)", DOCKERFILE)[0])
    context = pod(one)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, user, user)
    assert container(one)["securityContext"]["readOnlyRootFilesystem"] is True
    volumes = {each["name"]: each for each in pod(one)["volumes"]}
    mounts = {each["mountPath"]: each for each in container(one)["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == set(volumes)
    writable = {path for path, each in mounts.items() if not each.get("readOnly")}
    assert writable >= {"/tmp", "/home/moesaic"}
    models = re.findall(r"HF_HOME=(\S+)", DOCKERFILE)[0]
    claim = volumes[mounts[models]["name"]]["persistentVolumeClaim"]["claimName"]
    assert claim == name_of(named("PersistentVolumeClaim", claim))
    assert (models in writable) == (one not in JOINING), "only the server downloads"


def test_the_server_offers_what_prefill_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "server.yaml").read_text()
    offered = yaml.safe_load(re.sub(r"(?m)^( +)# - (?=--prefill-workers=1 )", r"\1- ", text))
    assert served(monkeypatch)[1].prefill_workers == 0
    assert served(monkeypatch, container(offered)["args"])[1].prefill_workers == 1


@pytest.mark.parametrize(("name", "commands"), [("kubernetes.md", 1), ("hosts.md", 13)])
def test_the_commands_of_the_page_are_understood(name: str, commands: int) -> None:
    page = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", page, flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines = [line for line in lines if line.startswith("moesaic ")]
    for line in lines:
        cli.app.parse_args(shlex.split(line, comments=True)[1:], exit_on_error=False, print_error=False)
    assert len(lines) == commands


def test_the_page_names_the_folder() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    folders = set(re.findall(r"(?:-k|init|>) (deploy/kubernetes)\b", page))
    assert folders == {FOLDER.relative_to(ROOT).as_posix()}


def test_the_overlay_names_every_file_and_this_version() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    offered = re.findall(r"^  # - (\S+\.yaml)", text, flags=re.MULTILINE)
    assert sorted([*OVERLAY["resources"], *offered]) == FILES
    [image] = OVERLAY["images"]
    assert image["newTag"] == moesaic.__version__
    assert {container(one)["image"] for one in SETS} == {image["name"]}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_overlay(tmp_path: Path) -> None:
    """Every file of it, also those that are offered in a comment."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    overlay = folder / "kustomization.yaml"
    overlay.write_text(re.sub(r"(?m)^  # - (?=\S+\.yaml)", "  - ", overlay.read_text()))
    assert cli.main(["cluster", "init", str(folder / "cluster.secret")]) == 0
    (folder / "keys.env").write_text("MOESAIC_API_KEY=geheim\n")
    command = ["kubectl", "kustomize", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = list(yaml.safe_load_all(built))
    assert [text for one in objects for text in complaints(one)] == []
    secrets = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "Secret"}
    sets = [one for one in objects if one["kind"] == "StatefulSet"]
    assert {name_of(one) for one in sets} == {name_of(one) for one in SETS}
    for one in sets:
        [volume] = [each for each in pod(one)["volumes"] if "secret" in each]
        data = secrets[volume["secret"]["secretName"]]
        assert base64.b64decode(data["cluster.secret"]) == (folder / "cluster.secret").read_bytes()
        assert container(one)["image"].endswith(f"/moesaic:{moesaic.__version__}")


def command(one: dict[str, Any], replaced: dict[str, str]) -> list[str]:
    """The command line of a pod, with these words replaced. Each has to be there."""
    line = "\n".join(container(one)["args"])
    for old, new in replaced.items():
        assert re.search(old, line), (old, line)
        line = re.sub(old, new, line)
    return [sys.executable, "-m", "moesaic", *line.splitlines(), "--json"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pods_are_a_cluster(tmp_path: Path) -> None:
    """A pod of each kind on this machine, which joins, answers with the others, and ends at SIGTERM."""
    secret = str(tmp_path / "cluster.secret")
    assert cli.main(["cluster", "init", secret]) == 0
    here = {"/etc/moesaic/cluster.secret": secret, r"--threads=\d+": "--threads=1"}
    at = {r"--host=\S+": "--host=127.0.0.1", r"--port=\d+": "--port=0", r"tcp:\S+:7000": "tcp:127.0.0.1:0"}
    asked = {"model": "demo", "prompt": "Tom has 3 apples", "max_tokens": 24, "temperature": 0}
    expected = LLM("demo").generate(asked["prompt"], SamplingParams(max_tokens=24, temperature=0.0))
    with ExitStack() as stack:

        def start(one: dict[str, Any], replaced: dict[str, str]) -> tuple[subprocess.Popen[str], Any]:
            """The process, and what it prints once it serves or has joined."""
            line = command(one, replaced)
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, json.loads(process.stdout.readline())

        offered = {r"--threads": "--prefill-workers=1\n--threads"}  # the comment in server.yaml
        server, told = start(named("StatefulSet", "moesaic-server"), here | at | offered)
        client = stack.enter_context(httpx.Client(base_url=told["url"], timeout=120, trust_env=False))

        def status() -> Any:
            return client.get("/v1/fault_tolerance/status").raise_for_status().json()

        address = status()["join_address"].removeprefix("tcp:")
        before = len(status()["processes"])
        processes = []
        for one in JOINING:
            process, event = start(one, here | {r"moesaic-server-0\.moesaic-cluster:7000": address})
            processes.append(process)
            assert event["event"] == "joined" and f"moesaic-{event['role']}" == name_of(one)
        end = time.monotonic() + 300
        while {each["stage"] for each in status()["processes"]} != {"serving"} or status()["change"]:
            assert time.monotonic() < end, status()
            time.sleep(0.2)
        assert len(status()["processes"]) == before + len(JOINING)
        for process in processes:
            answer = client.post("/v1/completions", json=asked).raise_for_status().json()
            assert answer["choices"][0]["text"] == expected[0].outputs[0].text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        answer = client.post("/v1/completions", json=asked).raise_for_status().json()
        assert answer["choices"][0]["text"] == expected[0].outputs[0].text
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
