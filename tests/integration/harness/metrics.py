"""Reads a Prometheus text exposition."""

import re
import urllib.request

_LINE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')


class Exposition:
    """Samples by name and labels; families with their HELP and TYPE."""

    def __init__(self, text):
        self.samples = {}  # (name, frozenset of label items) -> value
        self.types = {}
        self.helps = {}
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name, _, help_text = line[7:].partition(" ")
                self.helps[name] = help_text
            elif line.startswith("# TYPE "):
                name, kind = line[7:].split(" ")
                self.types[name] = kind
            elif line and not line.startswith("#"):
                match = _LINE.match(line)
                if not match:
                    raise AssertionError(f"not a sample: {line!r}")
                name, labels, value = match.groups()
                items = frozenset(_LABEL.findall(labels or ""))
                if (name, items) in self.samples:
                    raise AssertionError(f"twice in one exposition: {line!r}")
                self.samples[name, items] = float(value)

    def names(self):
        return {name for name, _ in self.samples}

    def select(self, name, **labels):
        """{labels as dict items: value} of the samples that carry all of `labels`."""
        wanted = set(labels.items())
        return {items: value for (n, items), value in self.samples.items()
                if n == name and wanted <= items}

    def total(self, name, **labels):
        """Sum of the samples that carry all of `labels`; 0 where there are none."""
        return sum(self.select(name, **labels).values())


def scrape(port, path="/metrics", timeout=20):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout) as reply:
        return Exposition(reply.read().decode())
