"""What benches in Python share: the harness of the end-to-end tests, and the last line."""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))


def parse(description, **options):
    """Arguments of a bench: --attnd, --fake-gpu-server and `options`, name = (default, help). What the
    harness reads from the environment is set here, so import it afterwards."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--attnd", required=True, help="the program")
    parser.add_argument("--fake-gpu-server", help="tests/fakes/attn_fake_gpu_server")
    for name, (default, about) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default,
                            help=f"{about} (default {default})")
    arguments = parser.parse_args()
    os.environ["ATTND"] = str(pathlib.Path(arguments.attnd).resolve())
    return arguments


def finish(name, value, bar, good):
    """Prints the last line and exits."""
    print(f"{name}: {value} (bar: {bar})", flush=True)
    sys.exit(0 if good else 1)
