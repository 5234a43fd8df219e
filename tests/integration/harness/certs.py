"""Certificates for TLS and mTLS, by the script that users are given."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from harness import contract

MAKE_CERTS = pathlib.Path(os.environ.get("ATTN_MAKE_CERTS",
                                         contract.ROOT / "deploy/tls/make_certs.sh"))


def make_certs():
    """A folder with ca, server and client, .crt and .key; gone after the module's tests."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="attn_certs_"))
    unittest.addModuleCleanup(shutil.rmtree, directory, ignore_errors=True)
    subprocess.run([str(MAKE_CERTS), str(directory)], check=True, timeout=60,
                   stdout=subprocess.DEVNULL)
    return directory
