"""A headless Chromium, driven by its DevTools protocol over a pipe: nothing but the browser is needed."""

import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

CHROMIUM = os.environ.get("ATTN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SLOWNESS = float(os.environ.get("ATTN_TEST_SLOWNESS", "1"))
TIMEOUT_S = 60.0 * SLOWNESS


class Browser:
    """One browser process with a profile of its own; a context manager."""

    def __enter__(self):
        self.profile = tempfile.mkdtemp(prefix="attn_chromium_")
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
        for fd in (commands, answers):
            os.close(fd)
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self.profile}",
                 "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--no-default-browser-check", "--mute-audio"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # its sandbox refuses root
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{moved[0]} 4>&{moved[1]}', "bash", CHROMIUM, *flags, "about:blank"],
            pass_fds=moved, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True)
        for fd in moved:
            os.close(fd)
        self._buffer, self._next, self._answers, self._pages = b"", 0, {}, {}
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)
        self._log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _receive(self, deadline):
        """Takes in one message: an answer, or an event for the page it belongs to."""
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise AssertionError("Chromium does not answer")
            data = os.read(self._in, 1 << 16)
            if not data:
                self._log.seek(0)
                raise AssertionError("Chromium has ended: " + self._log.read().decode(errors="replace")[-2000:])
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        if "id" in message:
            self._answers[message["id"]] = message
        elif message.get("sessionId") in self._pages:
            self._pages[message["sessionId"]].events.append(message)

    def call(self, method, session=None, **params):
        self._next += 1
        request = {"id": self._next, "method": method, "params": params}
        if session:
            request["sessionId"] = session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while request["id"] not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(request["id"])
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def page(self, **kwargs):
        return Page(self, **kwargs)


class Page:
    """A tab of `width` pixels that prefers `scheme`, "light" or "dark"; a context manager that closes it."""

    def __init__(self, browser, width=1200, height=900, scheme="light", mobile=False):
        self.browser, self.events = browser, []
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        browser._pages[self.session] = self
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=mobile,
                  deviceScaleFactor=2 if mobile else 1)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method, **params):
        return self.browser.call(method, session=self.session, **params)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, what, timeout=30.0):
        """Waits until an expression is true; returns its value."""
        deadline = time.monotonic() + timeout * SLOWNESS
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout * SLOWNESS:.0f} s; complaints: {self.complaints()}")
            time.sleep(0.05)

    def complaints(self):
        """Errors and warnings of the console, exceptions, and what a security policy has blocked."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event["method"] == "Page.javascriptDialogOpening":
                found.append(f"a dialog: {params['message']}")
        return found

    def screenshot(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))
