"""The examples of documentation, to be run."""

import re

from harness.contract import ROOT


def python_blocks(path):
    """The Python blocks of a Markdown file of the repository, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(encoding="utf-8"),
                      re.MULTILINE | re.DOTALL)
