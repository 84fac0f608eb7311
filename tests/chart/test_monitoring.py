"""The chart's alerts and dashboards: current, complete, valid, and whole after Helm rendered them."""

import copy
import json
import re
import sys
import unittest

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from rendering import CHART, REPO, Loader, faults, kube_versions, one, render

sys.dont_write_bytecode = True
sys.path.insert(0, str(REPO / "helm" / "dashboards"))
import generate  # noqa: E402

GENERATE = "run `make dashboards`"
ALERTS = {
    "FletchErrorBudgetBurn",
    "FletchWrongBytes",
    "FletchJobStalled",
    "FletchThrashing",
    "FletchDiskFailing",
    "FletchOriginErrors",
    "FletchOriginThrottled",
    "FletchCacheFull",
    "FletchMountBroken",
    "FletchEpochNotExactlyOnce",
    "FletchScrapeDown",
    "FletchVersionSkew",
    "FletchNoCoordinator",
    "FletchJobWaitsForServer",
    "FletchCertificateExpires",
    "FletchStateDiskFull",
    "FletchMemoryNearLimit",
    "FletchCredentialsExpire",
    "FletchRefreshFailed",
    "FletchRestartLoop",
}
RUNBOOKS = "https://github.com/fletch-cache/fletch/blob/main/docs/runbooks/"
# A ConfigMap holds at most 1 MiB.
CONFIG_MAP_MAX = 1 << 20
ON = {"monitoring": {"rules": {"enabled": True}, "dashboards": {"enabled": True}}}

register_default_plugins()


def files(kind, ending):
    return {path.name: path.read_text() for path in sorted((CHART / kind).glob(f"*.{ending}"))}


def groups():
    return [g for text in files("rules", "yaml").values() for g in yaml.load(text, Loader=Loader)["groups"]]


def alerts():
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def round_trip(board):
    """Returns a dashboard as the builder's types read it and write it again."""
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board)))


def boards():
    return {name: json.loads(text) for name, text in files("dashboards", "json").items()}


def panels(board):
    return [panel for panel in board["panels"] if panel["type"] != "row"]


class Rules(unittest.TestCase):
    def test_every_alert_has_severity_texts_and_a_runbook(self):
        self.assertEqual({rule["alert"] for rule in alerts()}, ALERTS)
        for rule in alerts():
            with self.subTest(rule["alert"]):
                self.assertIn(rule["labels"]["severity"], ("critical", "warning", "info"))
                texts = rule["annotations"]
                self.assertEqual(set(texts), {"summary", "description", "runbook_url"})
                self.assertEqual(texts["runbook_url"], f"{RUNBOOKS}{rule['alert']}.md")
                self.assertTrue((REPO / "docs" / "runbooks" / f"{rule['alert']}.md").is_file())
                self.assertTrue((REPO / "tests" / "alerts" / f"{rule['alert']}.yaml").is_file())

    def test_every_runbook_and_unit_test_belongs_to_an_alert(self):
        pages = {path.stem for path in (REPO / "docs" / "runbooks").glob("Fletch*.md")}
        tests = {path.stem for path in (REPO / "tests" / "alerts").glob("*.yaml")}
        self.assertEqual((pages, tests), (ALERTS, ALERTS))

    def test_annotations_survive_helm(self):
        objects, _ = render(ON)
        self.assertEqual(one(objects, "PrometheusRule")["spec"]["groups"], groups())
        shown = [rule["annotations"]["summary"] for rule in alerts()]
        self.assertTrue(any("{{ $labels.dataset }}" in text for text in shown), shown)


class Dashboards(unittest.TestCase):
    def test_files_are_what_the_script_writes(self):
        self.assertEqual(files("dashboards", "json"), generate.dashboards(), GENERATE)

    def test_files_have_the_types_of_grafana(self):
        for name, board in boards().items():
            self.assertEqual(round_trip(board), board, name)

    def test_a_wrong_dashboard_is_noticed(self):
        board = boards()["fletch-job.json"]
        key, kind, nested = copy.deepcopy(board), copy.deepcopy(board), copy.deepcopy(board)
        key["panels"][1]["descripton"] = "a key that no panel has"
        nested["panels"][1]["targets"][0]["query"] = "a key of another datasource"
        kind["panels"][1]["options"]["graphModes"] = "none"
        for wrong in (key, kind, nested):
            self.assertNotEqual(round_trip(wrong), wrong)

    def test_every_panel_has_texts_units_and_queries(self):
        for name, board in boards().items():
            self.assertGreater(len(panels(board)), 20, name)
            titles = [panel["title"] for panel in panels(board)]
            self.assertEqual(len(titles), len(set(titles)), titles)
            for panel in panels(board):
                with self.subTest(dashboard=name, panel=panel["title"]):
                    self.assertGreater(len(panel["description"]), 15)
                    self.assertTrue(panel["fieldConfig"]["defaults"]["unit"])
                    self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                    self.assertTrue(panel["targets"])
                    for target in panel["targets"]:
                        self.assertTrue(target["expr"] and target["legendFormat"] and target["refId"])
                    if panel["type"] == "stat":
                        self.assertTrue(panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
                    if panel["type"] == "timeseries":
                        self.assertTrue(panel["options"]["legend"]["showLegend"])

    def test_panels_fill_the_grid_without_overlaps(self):
        for name, board in boards().items():
            taken, numbers = {}, [panel["id"] for panel in board["panels"]]
            self.assertEqual(len(numbers), len(set(numbers)))
            for panel in board["panels"]:
                at = panel["gridPos"]
                for x in range(at["x"], at["x"] + at["w"]):
                    for y in range(at["y"], at["y"] + at["h"]):
                        self.assertNotIn((x, y), taken, (name, panel["title"], taken.get((x, y))))
                        taken[x, y] = panel["title"]
            heights = {y for _, y in taken}
            holes = [(x, y) for x in range(24) for y in heights if (x, y) not in taken]
            self.assertEqual((holes, max(x for x, _ in taken)), ([], 23), name)

    def test_variables_of_queries_exist(self):
        of_grafana = {"__rate_interval", "__range", "__all"}
        for name, board in boards().items():
            known = {variable["name"] for variable in board["templating"]["list"]} | of_grafana
            used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
            self.assertEqual(used - known, set(), name)

    def test_config_maps_hold_the_files(self):
        objects, _ = render(ON)
        for name, text in files("dashboards", "json").items():
            self.assertLess(len(text), CONFIG_MAP_MAX)
            found = one(objects, "ConfigMap", f"fletch-dashboard-{name.removesuffix('.json')}")
            self.assertEqual(found["data"], {name: text})
            for version in kube_versions():
                self.assertEqual(faults(found, version), [])


if __name__ == "__main__":
    unittest.main()
