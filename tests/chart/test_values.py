"""Wrong values are refused with the name of the key, and every value is described."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from rendering import CHART, REPO, render, server_spec, values

DIGEST = "sha256:" + "a" * 64
SECRET = {"name": "s", "key": "k"}
ETCD = {"endpoints": ["http://etcd:2379"]}
NAMESPACE = {"namespace": "a", "domain": "default"}

# Wrong values, and what the message must name.
REFUSED = [
    ({"servers": {}}, "servers"),
    ({"server": {"replica": 1}}, "replica"),
    ({"server": {"replicas": 0}}, "/server/replicas"),
    ({"server": {"kind": "Deployment"}}, "/server/kind"),
    ({"server": {"kind": "DaemonSet", "cache": {"storage": "emptyDir"}}}, "/server/state/existingClaim"),
    ({"server": {"cache": {"storage": "nfs"}}}, "/server/cache/storage"),
    ({"server": {"cache": {"size": "200GB"}}}, "/server/cache/size"),
    ({"server": {"cache": {"budgetPercent": 120}}}, "/server/cache/budgetPercent"),
    ({"server": {"memory": {"max": "lots"}}}, "/server/memory/max"),
    ({"server": {"service": {"port": "http"}}}, "/server/service/port"),
    ({"server": {"origins": [{"prefix": "s3://a"}]}}, "domains"),
    ({"server": {"origins": [{"prefix": "s3://a", "domains": ["x"], "secretKey": "x"}]}}, "secretKey"),
    (
        {"server": {"origins": [
            {"prefix": "s3://a", "domains": ["x"], "credentials": "env", "credentialsSecret": SECRET}
        ]}},
        "/server/origins/0/credentials",
    ),
    ({"server": {"podDisruptionBudget": {"minAvailable": 1}}}, "minAvailable"),
    ({"images": {"server": {"digest": DIGEST[:-1]}}}, "/images/server/digest"),
    ({"auth": {"tokensSecret": {"name": ""}}}, "/auth/tokensSecret/name"),
    ({"auth": {"token": "secret"}}, "token"),
    ({"mounts": {"domains": []}}, "/mounts/domains"),
    ({"mounts": {"domains": [{"name": "../x", "tokenSecret": SECRET}]}}, "/mounts/domains/0/name"),
    ({"mounts": {"domains": [{"name": "x", "tokenSecret": {"name": "s"}}]}}, "key"),
    ({"mounts": {"namespaces": [{"namespace": "a"}]}}, "domain"),
    ({"mounts": {"hostPath": "/var/lib/x"}}, "/mounts/hostPath"),
    ({"mounts": {"keep": "soon"}}, "/mounts/keep"),
    ({"mounts": {"updateStrategy": "Recreate"}}, "/mounts/updateStrategy"),
    ({"mounts": {"nodeLabel": {"enabled": "yes"}}}, "/mounts/nodeLabel/enabled"),
    ({"priorityClass": {"preemptionPolicy": "Always"}}, "/priorityClass/preemptionPolicy"),
    ({"monitoring": {"serviceMonitor": {"enabled": "yes"}}}, "/monitoring/serviceMonitor/enabled"),
    ({"cluster": {"etcd": {"endpoints": ["etcd:2379"]}}}, "/cluster/etcd/endpoints/0"),
    ({"cluster": {"forgetAfter": "soon"}}, "/cluster/forgetAfter"),
    # Between values: the templates check these.
    ({"server": {"replicas": 2}}, "set cluster.enabled"),
    ({"cluster": {"enabled": True}}, "cluster.etcd.endpoints"),
    ({"cluster": {"etcd": {"deploy": {"enabled": True}}}}, "needs cluster.enabled"),
    ({"cluster": {"enabled": True, "etcd": ETCD}}, "cluster.insecurePeers"),
    (
        {"cluster": {"enabled": True, "etcd": {**ETCD, "deploy": {"enabled": True}}}},
        "set one of the two",
    ),
    (
        {"cluster": {"enabled": True, "insecurePeers": True, "etcd": {**ETCD, "user": "fletch"}}},
        "cluster.etcd.passwordSecret.name",
    ),
    (
        {"cluster": {"enabled": True, "etcd": ETCD}, "tls": {"enabled": True, "existingSecret": "s"},
         "server": {"kind": "DaemonSet", "cache": {"storage": "emptyDir"}, "state": {"existingClaim": "c"}}},
        "a DaemonSet has no names for certificates",
    ),
    ({"mounts": {"namespaces": [{"namespace": "a", "domain": "other"}]}}, "the domain other is not in"),
    ({"mounts": {"enabled": False, "namespaces": [NAMESPACE]}}, "mounts.namespaces needs mounts.enabled"),
    ({"test": {"enabled": True, "domain": "other"}}, "test.domain"),
    ({"tls": {"enabled": True}}, "tls.existingSecret"),
    ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
    ({"tls": {"existingSecret": "s", "certManager": {"enabled": True}}}, "set one of the two"),
    ({"tls": {"clientCA": {"name": "s"}}}, "tls.clientCA needs tls.enabled"),
    ({"server": {"s3": {"enabled": True, "port": 7380}}}, "server.s3.port"),
    ({"server": {"s3": {"bucket": "No"}}}, "bucket"),
    ({"tls": {"enabled": True, "existingSecret": "s", "clientCA": {"name": "s"}}}, "tls.clientSecret"),
    ({"tls": {"certManager": {"issuerRef": {"nmae": "x"}}}}, "nmae"),
    (
        {"mounts": {"domains": [{"name": "a", "tokenSecret": SECRET}] * 2}},
        "mounts.domains",
    ),
]


def leaves(tree, path=()):
    """Returns the paths of all values, and of all tables."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


class Values(unittest.TestCase):
    def test_wrong_values_are_refused_by_name(self):
        self.assertGreaterEqual(len(REFUSED), 12)
        for given, named in REFUSED:
            with self.subTest(values=given):
                with self.assertRaises(Exception) as refused:
                    render(given)
                self.assertIn(named, str(refused.exception))

    def test_sizes_may_end_in_b(self):
        def given(size, memory):
            server = {
                "cache": {"size": f"200{size}"},
                "state": {"size": f"9{size}"},
                "memory": {"max": f"3{memory}"},
            }
            etcd = {"deploy": {"enabled": True, "size": f"3{size}"}}
            cluster = {"enabled": True, "insecurePeers": True, "etcd": etcd}
            return render({"server": server, "cluster": cluster, "mounts": {"cache": {"size": f"7{memory}"}}})

        self.assertEqual(given("Gi", "GiB"), given("GiB", "GiB"))
        temporary = {"storage": "emptyDir", "size": "20GiB"}
        limits = [
            volume["emptyDir"]["sizeLimit"]
            for volume in server_spec(render({"server": {"cache": temporary}})[0])["volumes"]
            if "sizeLimit" in volume.get("emptyDir", {})
        ]
        self.assertIn("20Gi", limits)
        self.assertNotIn("20GiB", limits)

    def test_the_schema_allows_no_unknown_key(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        open_tables = []

        def walk(node, path):
            if isinstance(node, list):
                for item in node:
                    walk(item, path)
            elif isinstance(node, dict):
                if "properties" in node and "type" in node:
                    if node.get("additionalProperties") is not False:
                        open_tables.append(path)
                for key, value in node.items():
                    walk(value, f"{path}/{key}")

        walk(schema, "")
        self.assertEqual(open_tables, [])

    def test_the_schema_knows_every_value_and_no_other(self):
        schema = json.loads((CHART / "values.schema.json").read_text())

        def follow(node):
            while "$ref" in node:
                node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
            return node

        def known(node, path=()):
            for key, value in follow(node).get("properties", {}).items():
                yield (*path, key)
                yield from known(value, (*path, key))

        defaults = set(leaves(values(CHART / "values.yaml")))
        described = set(known(schema)) - {("global",), ("server", "resources", "claims")}
        described -= {("mounts", "resources", "claims"), ("mounts", "keeper", "resources", "claims"),
                      ("cluster", "etcd", "deploy", "resources", "claims")}
        free = {"podSecurityContext", "securityContext", "requests", "limits", "labels"}
        defaults = {path for path in defaults if not free & set(path[:-1])}
        self.assertEqual(described - defaults, set(), "in the schema only")
        self.assertEqual(defaults - described, set(), "in values.yaml only")

    def test_the_readme_is_current(self):
        done = subprocess.run(
            [sys.executable, REPO / "helm" / "generate-readme.py", "--check"], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_old_readme_and_a_bare_value_are_noticed(self):
        with tempfile.TemporaryDirectory() as scratch:
            helm = pathlib.Path(shutil.copytree(REPO / "helm", pathlib.Path(scratch) / "helm"))

            def check(*arguments):
                return subprocess.run(
                    [sys.executable, helm / "generate-readme.py", *arguments], capture_output=True, text=True
                )

            source = helm / "fletch" / "values.yaml"
            text = source.read_text()
            self.assertEqual(check("--check").returncode, 0)
            source.write_text(text.replace("size: 200Gi", "size: 300Gi"))
            self.assertIn("not current", check("--check").stderr)
            self.assertEqual(check().returncode, 0)
            self.assertEqual(check("--check").returncode, 0)
            source.write_text(text.replace("    # Policy of the cache: `fletch`, `lru` or `pin`.\n", ""))
            self.assertIn("server.cache.policy", check("--check").stderr)

    def test_the_readme_has_a_row_for_every_value(self):
        rows = (CHART / "README.md").read_text()
        whole = {"podSecurityContext", "securityContext", "resources", "labels"}
        for path in leaves(values(CHART / "values.yaml")):
            node = values(CHART / "values.yaml")
            for key in path:
                node = node[key]
            if (isinstance(node, dict) and node) or whole & set(path[:-1]):
                continue
            self.assertIn(f"| `{'.'.join(path)}` |", rows)


if __name__ == "__main__":
    unittest.main()
