"""The status page in a real browser, under real traffic: light, dark, and on a phone."""

import os
import pathlib
import signal
import unittest

import numpy as np

from harness import contract
from harness.browser import CHROMIUM, Browser
from harness.cases import simple_case
from harness.load import HOSTILE, Load, mixed_requests, send_hostile
from harness.server import Attnd, absent_cuda_paths

SHOTS = os.environ.get("ATTN_SCREENSHOTS")  # a folder: keep pictures there


@unittest.skipUnless(CHROMIUM, "no Chromium here: the page is not tried in a browser (Debian package chromium)")
class StatusBrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if CHROMIUM:
            cls.browser = cls.enterClassContext(Browser())

    def shot(self, page, name):
        if SHOTS:
            page.screenshot(pathlib.Path(SHOTS) / f"{name}.png")

    def url(self, server):
        return f"http://127.0.0.1:{server.metrics_port}/"

    def check_layout(self, page, width):
        self.assertEqual(page.run("document.documentElement.scrollWidth"), width, "the page is wider than the window")
        self.assertEqual(page.complaints(), [])

    def test_under_traffic(self):
        with Attnd("--canary-interval=500ms") as server, \
                Load(server, mixed_requests(np.random.default_rng(2)), pause=0.02):
            send_hostile(server)
            for name, options in (("light", {}), ("dark", {"scheme": "dark"}),
                                  ("phone", {"width": 390, "height": 844, "mobile": True, "scheme": "dark"})):
                with self.subTest(name), self.browser.page(**options) as page:
                    page.open(self.url(server))
                    page.wait("document.querySelectorAll('#calls tbody tr').length >= 20 && "
                              "document.querySelectorAll('#charts path.line[d*=L]').length >= 6",
                              "calls and charts show")
                    self.assertIn("Flash is partly on", page.run("document.querySelector('#verdict h2').textContent"))
                    cards = page.run("[...document.querySelectorAll('.card b')].map((b) => b.textContent)")
                    self.assertEqual(len(cards), 10)
                    for card in cards:
                        self.assertRegex(card, r"\d")
                    self.assertEqual(page.run("document.querySelectorAll('#plans .chip').length"), 36)
                    self.assertGreater(page.run("document.querySelectorAll('#plans dl.why dd p').length"), 0)
                    self.assertGreaterEqual(page.run("document.querySelectorAll('#traffic .bars').length"), 5)
                    page.wait("document.querySelectorAll('#rooflines circle').length >= 3", "dots on the roofline")
                    self.assertGreaterEqual(page.run("document.querySelectorAll('#health tbody tr').length"), 8)
                    background = page.run("getComputedStyle(document.body).backgroundColor")
                    self.assertEqual(background == "rgb(20, 23, 26)", name != "light")
                    self.assertNotIn("NaN", page.run("document.body.innerText"))
                    self.assertNotIn("undefined", page.run("document.body.innerText"))
                    self.check_layout(page, options.get("width", 1200))
                    self.shot(page, name)
                    self.check_report(page, name)
                    self.check_layout(page, options.get("width", 1200))

    def check_report(self, page, name):
        """A click on a call opens its report, and it stays while the page goes on."""
        chosen = page.run("(() => { const b = [...document.querySelectorAll('#calls tr')].find((r) => "
                          "r.querySelector('.chip.flash')).querySelector('button'); b.scrollIntoView(); b.click(); "
                          "return b.textContent; })()")
        self.assertEqual(page.run("document.querySelector('#call-title').textContent"), f"Call {chosen}")
        self.assertTrue(page.run("document.querySelector('#call').open"))
        text = page.run("document.querySelector('#call').innerText")
        reason = absent_cuda_paths()["flash_sm90"]
        for word in ("kernel", "flash_cpu_", "standard", "not taken", reason):
            self.assertIn(word, text)
        self.shot(page, f"{name}_report")
        page.run("document.querySelector('#call-close').click()")
        self.assertFalse(page.run("document.querySelector('#call').open"))

    def test_before_the_first_call_and_hostile_text(self):
        with Attnd() as server:
            page = self.enterContext(self.browser.page())
            page.open(self.url(server))
            page.wait("document.querySelector('#verdict h2')?.textContent === 'No call yet'", "the empty page shows")
            page.wait("document.querySelectorAll('#plans .chip').length >= 36", "plans show")
            self.check_layout(page, 1200)
            self.shot(page, "empty")
            send_hostile(server)
            page.wait("document.querySelectorAll('#calls button').length", "the call shows")
            page.run("document.querySelector('#calls button').click()")
            self.assertIn(HOSTILE[:40], page.run("document.querySelector('#call').textContent"))
            self.assertEqual(page.run("document.querySelectorAll('img').length"), 0)
            self.assertEqual(page.run("document.title"), "attnd")
            self.assertEqual(page.complaints(), [])

    def test_scripts_of_others_do_not_run(self):
        with Attnd() as server:
            page = self.enterContext(self.browser.page())
            page.open(self.url(server))
            page.wait("document.querySelectorAll('#plans .chip').length >= 36", "the page shows")
            page.run("(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 1';"
                     " document.body.append(s); })()")
            self.assertIsNone(page.run("window.pwned"))
            self.assertIn("Content Security Policy", " ".join(page.complaints()))

    def test_a_change_and_the_end_of_the_server(self):
        server = Attnd("--canary-interval=0s")
        config = server.directory / "attnd.toml"
        config.write_text("")
        server.command.append(f"--config={config}")
        with server:
            case = simple_case(np.random.default_rng(1)).forward_request()
            page = self.enterContext(self.browser.page())
            page.open(self.url(server))
            stub = server.stub()
            stub.Forward(case, timeout=contract.TIMEOUT_S)
            page.wait("document.querySelector('#verdict h2')?.textContent === 'Flash is on'", "on")
            config.write_text('disable-path = ["flash_cpu"]\n')
            server.process.send_signal(signal.SIGHUP)
            page.wait("![...document.querySelectorAll('#plans .chip')].some((c) => c.textContent.startsWith('flash_cpu'))",
                      "the plans follow")
            stub.Forward(case, timeout=contract.TIMEOUT_S)
            page.wait("document.querySelector('#verdict p').textContent.includes('DISABLED_BY_CONFIG')",
                      "the verdict gives the reason")
            self.assertIn("partly on", page.run("document.querySelector('#verdict h2').textContent"))
            self.assertEqual(page.complaints(), [])
            server.stop()
            page.wait("document.querySelector('#lost')?.hidden === false", "the page says that nobody answers")
            self.assertIn("Flash is partly on", page.run("document.querySelector('#verdict h2').textContent"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
