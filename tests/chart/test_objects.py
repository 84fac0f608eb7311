"""Every rendered object is valid in the oldest and the newest supported version of Kubernetes."""

import copy
import pathlib
import shutil
import tempfile
import unittest

from helm_python import Chart, lint
from rendering import (
    CHART, CI, EXAMPLES, documents, faults, kube_versions, one, render, rendered, title, values,
)


class Objects(unittest.TestCase):
    def test_every_object_is_valid(self):
        self.assertEqual(len(CI), 11)
        versions = kube_versions()
        self.assertEqual(len(set(versions)), 2, versions)
        for path in CI:
            objects = rendered(path)
            self.assertGreater(len(objects), 4, path.name)
            for version in versions:
                for document in objects:
                    with self.subTest(values=path.name, kubernetes=version, object=title(document)):
                        self.assertEqual(faults(document, version), [])

    def test_a_wrong_object_is_refused(self):
        sound = one(rendered(CHART / "ci" / "monitoring-values.yaml"), "StatefulSet")
        monitor = one(rendered(CHART / "ci" / "monitoring-values.yaml"), "ServiceMonitor")
        for version in kube_versions():
            unknown = copy.deepcopy(sound)
            unknown["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
            wrong = copy.deepcopy(sound)
            wrong["spec"]["replicas"] = "one"
            foreign = copy.deepcopy(monitor)
            foreign["spec"]["endpoints"][0]["bearerToken"] = "x"
            for document in (unknown, wrong, foreign):
                self.assertNotEqual(faults(document, version), [], version)

    def test_a_key_that_occurs_twice_is_refused(self):
        with self.assertRaisesRegex(Exception, "twice"):
            documents("a: 1\nb: {c: 1, c: 2}\n")

    def test_helm_finds_no_fault(self):
        for path in CI:
            report = lint(str(CHART), values=values(path), strict=True)
            # The severities 2 and 3 are warnings and errors.
            found = [m for m in report["messages"] if m["severity"] > 1]
            self.assertEqual((report["errors"], found), ([], []), path.name)
        self.assertTrue(lint(str(CHART), values={"server": {"replicas": 0}})["errors"])

    def test_the_package_renders_the_same(self):
        given = values(CHART / "ci" / "test-values.yaml")
        with tempfile.TemporaryDirectory() as scratch:
            with Chart.load(str(CHART)) as chart:
                archive = chart.save(scratch)
            self.assertEqual(render(given, archive), render(given))

    def test_names_are_unique_and_short(self):
        for path in CI:
            names = [
                (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in rendered(path)
            ]
            self.assertEqual(len(names), len(set(names)), path.name)
        long, _ = render(values(CHART / "ci" / "default-values.yaml"), name="a" * 53)
        for document in long:
            limit = 253 if document["kind"] == "PersistentVolume" else 63
            self.assertLessEqual(len(document["metadata"]["name"]), limit, title(document))

    def test_common_labels_and_annotations_are_everywhere(self):
        for document in rendered(CHART / "ci" / "everything-values.yaml"):
            if document["metadata"]["name"].endswith("-extra"):
                self.assertEqual(document["data"], {"release": "fletch"})
                continue
            meta = document["metadata"]
            self.assertEqual(meta["labels"]["cost-centre"], "42", title(document))
            self.assertEqual(meta["annotations"]["example.com/owner"], "storage", title(document))

    def test_rules_and_dashboards_come_from_files(self):
        with tempfile.TemporaryDirectory() as scratch:
            chart = pathlib.Path(shutil.copytree(CHART, pathlib.Path(scratch) / "fletch"))
            for kind in ("rules", "dashboards"):
                shutil.rmtree(chart / kind, ignore_errors=True)
                with self.assertRaisesRegex(Exception, f"monitoring.{kind}.enabled.*no files"):
                    render({"monitoring": {kind: {"enabled": True}}}, chart)
                (chart / kind).mkdir()
            rule = "      - {alert: Down, expr: up == 0, annotations: {text: 'of {{ $labels.pod }}'}}\n"
            (chart / "rules" / "a.yaml").write_text(f"groups:\n  - name: a\n    rules:\n{rule}")
            (chart / "rules" / "b.yaml").write_text(f"groups:\n  - name: b\n    rules:\n{rule}")
            (chart / "dashboards" / "Node_view.json").write_text('{"title": "{{ node }}"}\n')
            on = {"rules": {"enabled": True}, "dashboards": {"enabled": True}}
            objects, _ = render({"monitoring": on}, chart)
            for version in kube_versions():
                for document in objects:
                    self.assertEqual(faults(document, version), [], title(document))
            groups = one(objects, "PrometheusRule")["spec"]["groups"]
            self.assertEqual([g["name"] for g in groups], ["a", "b"])
            self.assertEqual(groups[0]["rules"][0]["annotations"]["text"], "of {{ $labels.pod }}")
            board = one(objects, "ConfigMap", "fletch-dashboard-node-view")
            self.assertEqual(board["data"], {"Node_view.json": '{"title": "{{ node }}"}\n'})
            self.assertEqual(board["metadata"]["labels"]["grafana_dashboard"], "1")
            off, _ = render({}, chart)
            self.assertFalse([o for o in off if "dashboard" in o["metadata"]["name"]])

    def test_nothing_of_prometheus_without_its_switch(self):
        kinds = {o["kind"] for o in rendered(CHART / "ci" / "default-values.yaml")}
        self.assertFalse(kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "NetworkPolicy"}, kinds)

    def test_values_of_the_examples_render(self):
        objects, _ = render(values(EXAMPLES / "fletch-values.yaml"))
        for document in objects:
            self.assertEqual(faults(document, kube_versions()[0]), [], title(document))
        prometheus = values(EXAMPLES / "kube-prometheus-values.yaml")["prometheus"]["prometheusSpec"]
        for kind, key in (("ServiceMonitor", "serviceMonitor"), ("PodMonitor", "podMonitor")):
            wanted = prometheus[f"{key}Selector"]["matchLabels"]
            labels = one(objects, kind)["metadata"]["labels"]
            self.assertLessEqual(wanted.items(), labels.items())


if __name__ == "__main__":
    unittest.main()
