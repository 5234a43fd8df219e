"""Result files: what was measured, where, when and of which state of the code."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

import sources


def _smi(field):
    try:
        answer = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.strip().split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"none ({type(error).__name__})"


def _torch_versions():
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {"cuda": torch.version.cuda, "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version()}


def measured_sources():
    """Hashes of what the programs were built from: a bundle brings its own."""
    bundled = os.environ.get("ATTN_SOURCES_FILE")
    return json.loads(pathlib.Path(bundled).read_text()) if bundled else sources.all_hashes()


def provenance():
    """Where, when and with what a result was measured."""
    return {
        "gpu": _smi("name"),
        "driver": _smi("driver_version"),
        "sm_clock": _smi("clocks.sm"),
        "sm_clock_max": _smi("clocks.max.sm"),
        **_torch_versions(),
        "host": platform.platform(),
        "commit": os.environ.get("ATTN_COMMIT", "unknown"),
        "sources": measured_sources(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def write_result(directory, name, result, method):
    """DIR/NAME.json: what the program measured, with its provenance."""
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    content = {"name": name, **provenance(), "method": method, **result}
    (path / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path / name}.json", flush=True)
