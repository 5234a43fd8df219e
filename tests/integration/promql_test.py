"""Prometheus, alerts and dashboards of deploy/, against the real Prometheus and real servers under load.

One server is attnd as this host has it, the other a host with GPUs as far as metrics go
(tests/fakes/fake_gpu_server.cc), so that panels of GPUs have data, too.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import yaml

from harness import queries
from harness.contract import pb
from harness.load import Load, mixed_requests
from harness.prometheus import DEPLOY, RULES, Prometheus, promtool
from harness.server import Attnd, wait_until

FAKE_GPU_SERVER = os.environ.get("ATTN_FAKE_GPU_SERVER")


class PromqlTest(unittest.TestCase):
    """Queries, while both servers are called."""

    @classmethod
    def setUpClass(cls):
        cls.servers = [cls.enterClassContext(Attnd("--canary-interval=500ms")),
                       cls.enterClassContext(Attnd("--canary-interval=500ms",
                                                   program=FAKE_GPU_SERVER))]
        requests = mixed_requests(np.random.default_rng(3))
        cls.loads = [cls.enterClassContext(Load(s, requests, pause=0.005)) for s in cls.servers]
        cls.prometheus = cls.enterClassContext(
            Prometheus([f"127.0.0.1:{s.metrics_port}" for s in cls.servers]))

        def recorded():
            for server in cls.servers:
                if not server.alive():
                    raise AssertionError(f"a server ended:\n{server.log()[-4000:]}")
            return queries.all_recorded(cls.prometheus)

        wait_until(recorded, "every recorded series has samples", 60, cls.prometheus.process)
        cls.known = queries.known_series(*(s.metrics() for s in cls.servers))

    def check(self, some):
        self.assertTrue(some)
        for query in some:
            with self.subTest(source=query.source, title=query.title, query=query.expression):
                self.assertEqual(queries.problems(query, self.prometheus, self.known), [])

    def test_dashboards(self):
        self.check(queries.from_dashboards())

    def test_rules_and_alerts(self):
        self.check(queries.from_rules())

    def test_nothing_fires_that_should_not(self):
        # Calls of this load are refused as invalid and forced off flash; nothing else is amiss.
        self.assertLessEqual(self.prometheus.alerts(), {"AttnFlashShareLow"})

    def test_targets_are_up(self):
        self.assertEqual(self.prometheus.value('sum(up{job="attnd"})'), 2)
        self.assertEqual(self.prometheus.value("min(attn_canary_ok)"), 1)


class RulesTest(unittest.TestCase):
    """What needs no server."""

    def test_promtool_accepts_everything(self):
        for arguments in (("check", "config", RULES / "prometheus.yml"),
                          ("check", "rules", RULES / "rules.yml", RULES / "alerts.yml"),
                          ("test", "rules", RULES / "alerts_test.yml")):
            status, output = promtool(*arguments)
            self.assertEqual(status, 0, output)

    def failures(self, mutation):
        """[(expected, got)] of the tests that fail where every condition is `mutation` of itself."""
        with tempfile.TemporaryDirectory() as directory:
            folder = pathlib.Path(directory)
            for name in ("rules.yml", "alerts_test.yml"):
                shutil.copy(RULES / name, folder)
            rules = yaml.safe_load((RULES / "alerts.yml").read_text())
            for group in rules["groups"]:
                for rule in group["rules"]:
                    rule["expr"] = mutation(rule["expr"])
            (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
            status, output = promtool("test", "rules", "alerts_test.yml", cwd=folder)
        self.assertNotEqual(status, 0)
        return re.findall(r"exp: ?(.*?)got: ?(.*?)(?=\n\n|\Z)", output, flags=re.S)

    def test_every_alert_has_a_test_that_it_fires_and_that_it_stays_quiet(self):
        silent = self.failures(lambda expression: "vector(1) < 0")
        loud = self.failures(queries.unfiltered)  # true wherever there is something to compare
        for alert in queries.alert_names():
            label = f'alertname="{alert}"'
            with self.subTest(alert=alert):
                self.assertTrue(any(label in expected and label not in got
                                    for expected, got in silent), "no test expects it")
                self.assertTrue(any(got.count(label) > expected.count(label)
                                    for expected, got in loud), "no test expects quiet of it")

    def test_known_reasons_are_those_of_the_contract(self):
        (rule,) = [r for g in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
                   for r in g["rules"] if r["alert"] == "AttnUnknownReason"]
        listed = re.search(r'reason!~"([A-Z_|]+)"', rule["expr"]).group(1).split("|")
        self.assertEqual(listed, [n[len("REASON_"):] for n, v in pb.Reason.items() if v])


class GrafanaTest(unittest.TestCase):
    """Form only: Grafana is not packaged for the systems that attnd is tested on."""

    def dashboards(self):
        for path in sorted(queries.DASHBOARDS.glob("*.json")):
            yield path.name, json.loads(path.read_text())

    def test_dashboards_are_what_the_source_writes(self):
        done = subprocess.run([sys.executable, DEPLOY / "grafana/make_dashboards.py", "--check"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_form(self):
        (source,) = yaml.safe_load(
            (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
        uids = set()
        for name, board in self.dashboards():
            with self.subTest(dashboard=name):
                self.assertNotIn(board["uid"], uids)
                uids.add(board["uid"])
                self.assertLessEqual(len(board["uid"]), 40)
                self.assertNotIn("id", board)
                variables = {v["name"] for v in board["templating"]["list"]}
                numbers, taken = set(), set()
                for panel in board["panels"]:
                    self.assertNotIn(panel["id"], numbers)
                    numbers.add(panel["id"])
                    at = panel["gridPos"]
                    self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
                    cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                             for y in range(at["y"], at["y"] + at["h"])}
                    self.assertFalse(cells & taken, f"{panel['title']} lies over another panel")
                    taken |= cells
                    if panel["type"] == "row":
                        continue
                    self.assertIn(panel["type"], {"timeseries", "stat", "bargauge", "heatmap"})
                    self.assertTrue(panel["description"].endswith("."), panel["title"])
                    self.assertEqual(panel["datasource"]["uid"], source["uid"])
                    ids = [t["refId"] for t in panel["targets"]]
                    self.assertEqual(len(set(ids)), len(ids))
                    for target in panel["targets"]:
                        used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                        self.assertLessEqual(used, variables)
                        self.assertEqual(target["datasource"]["uid"], source["uid"])

    def test_compose_names_what_is_there(self):
        compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        services = compose["services"]
        for service in services.values():
            for mount in service.get("volumes", ()):
                where = mount.split(":")[0]
                self.assertTrue((DEPLOY / where).exists() or where in compose["volumes"], where)
            for port in service["ports"]:
                self.assertTrue(port.startswith("127.0.0.1:"), port)
        config = yaml.safe_load((RULES / "prometheus.yml").read_text())
        (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
        self.assertIn(target.split(":")[0], services)
        self.assertIn(f"0.0.0.0:{target.split(':')[1]}", services["attnd"]["command"])
        (source,) = yaml.safe_load(
            (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
        self.assertIn(re.match(r"http://(\w+):9090$", source["url"]).group(1), services)


if __name__ == "__main__":
    unittest.main(verbosity=2)
