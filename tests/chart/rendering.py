"""Renders the chart with the engine of Helm, and checks objects against the schemas of Kubernetes."""

import functools
import json
import pathlib
import re

import jsonschema
import kubernetes_validate
import yaml
from helm_python import Chart

REPO = pathlib.Path(__file__).resolve().parents[2]
CHART = REPO / "helm" / "fletch"
EXAMPLES = REPO / "examples" / "kubernetes"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "fletch"


class Loader(yaml.SafeLoader):
    """Reads YAML as Kubernetes does: a key that occurs twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"{node.start_mark}: keys that occur twice: {sorted(twice)}")
        return super().construct_mapping(node, deep)


def documents(text):
    """Returns the objects of a YAML text."""
    return [document for document in yaml.load_all(text, Loader=Loader) if document]


def values(path):
    """Returns the values in a file."""
    return yaml.load(path.read_text(), Loader=Loader)


def render(given, chart=CHART, name="fletch"):
    """Returns the rendered objects, and the notes."""
    with Chart.load(chart) as loaded:
        files = loaded.render(values=given, name=name, namespace=NAMESPACE)
    notes = "".join(text for path, text in files.items() if path.endswith("NOTES.txt"))
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [document for text in texts for document in documents(text)], notes


@functools.cache
def rendered(path):
    """Returns the objects for a file of values."""
    return render(values(path))[0]


def kube_versions():
    """Returns the oldest version that Chart.yaml allows, and the newest one with schemas."""
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    oldest = re.fullmatch(r">=(\d+\.\d+)\.0-0", meta["kubeVersion"]).group(1)
    newest = kubernetes_validate.latest_version()
    return [oldest, ".".join(newest.split(".")[:2])]


@functools.cache
def schema(version, kind, api):
    """Returns a validator for a kind, with the strict schemas of a version of Kubernetes."""
    home = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    found = home / f"v{version}.0-local-strict"
    assert found.is_dir(), f"kubernetes-validate has no schemas of Kubernetes {version}"
    operators = {"monitoring.coreos.com": "monitoring", "cert-manager.io": "certmanager"}
    operator = operators.get(api.split("/")[0])
    if operator:
        own = json.loads((pathlib.Path(__file__).parent / f"{operator}.schema.json").read_text())
        return jsonschema.Draft202012Validator({**own, "$ref": f"#/$defs/{kind}"})
    return None


def faults(document, version):
    """Returns what the strict schemas of a version of Kubernetes refuse in an object."""
    own = schema(version, document["kind"], document["apiVersion"])
    if own is not None:
        return [f"{list(error.path)}: {error.message}" for error in own.iter_errors(document)]
    try:
        checked = kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{list(error.path)}: {error.message}"]
    assert checked == version, f"checked against {checked} in place of {version}"
    return []


def title(document):
    """Returns the kind and the name of an object."""
    return f"{document['kind']}/{document['metadata'].get('name')}"


def one(objects, kind, name=None):
    """Returns the only object of a kind, or the one with a name."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects {kind}/{name}"
    return found[0]


def pod_specs(objects):
    """Returns (title, specification) of each pod that the objects make."""
    out = []
    for document in objects:
        if document["kind"] == "Pod":
            out.append((title(document), document["spec"]))
        elif document["kind"] in ("StatefulSet", "DaemonSet", "Job"):
            out.append((title(document), document["spec"]["template"]["spec"]))
    return out


def containers(spec):
    """Returns all containers of a pod."""
    return spec.get("initContainers", []) + spec["containers"]


def server_spec(objects):
    """Returns the pod of the server."""
    found = [s for _, s in pod_specs(objects) if s["containers"][0]["name"] == "server"]
    assert len(found) == 1
    return found[0]


def settings(objects):
    """Returns the settings file of the server."""
    maps = [o for o in objects if o["kind"] == "ConfigMap" and "fletch.toml" in o["data"]]
    assert len(maps) == 1
    return maps[0]["data"]["fletch.toml"]
