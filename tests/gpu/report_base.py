"""What the verdicts of report.py share: reading results, and refusing what gives none."""

import json
import math
import pathlib

import sources

SM90, FLASH, STANDARD = "flash_sm90", "flash_sm80", "standard_cuda"
PATHS = (SM90, FLASH, STANDARD)
# What results depend on: those of flash_sm80 and standard_cuda stay valid when sm90 changes.
FLASH_PARTS = ("kernels/cuda/common", "kernels/cuda/ptx", "kernels/cuda/sm80")
OLD_CUDA = ("kernels/api", *FLASH_PARTS, "kernels/cuda/standard")
SM90_PARTS = ("kernels/cuda/common", "kernels/cuda/ptx", "kernels/cuda/sm90")
CUDA = (*OLD_CUDA, "kernels/cuda/sm90")
EXACTNESS_PARTS = (*CUDA, "kernels/cuda/runtime", "tests/exactness", "tests/reference")
SERVER = (*CUDA, "kernels/cuda/runtime", "server", "proto")
TOOLS = {"memcheck", "racecheck", "initcheck", "synccheck"}


class Bad(Exception):
    """No verdict: a result is missing, stale, incomplete or of a run that failed."""


class Verdict:
    def __init__(self, value, bar, holds):
        self.value, self.bar, self.holds = value, bar, holds


class Results:
    def __init__(self, directory, any_sources):
        self.directory, self.any_sources = pathlib.Path(directory), any_sources
        self.hashes = sources.all_hashes()

    def read(self, name, parts):
        """The result NAME.json, measured of the present text of `parts`."""
        path = self.directory / f"{name}.json"
        try:
            result = json.loads(path.read_text())
        except FileNotFoundError:
            raise Bad(f"no {path}; tests/gpu/run.sh writes it") from None
        except ValueError as error:
            raise Bad(f"{path} is not JSON: {error}") from None
        for field in ("gpu", "driver", "commit", "date", "method", "sources"):
            if field not in result:
                raise Bad(f"{path} does not say its {field}")
        stale = [part for part in parts if result["sources"].get(part) != self.hashes[part]]
        if stale and not self.any_sources:
            raise Bad(f"{path} is stale: {', '.join(stale)} changed since it was measured "
                      f"({result['date']}, commit {result['commit']})")
        return result


def geomean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def complete_cells(result, count, name):
    """The cells of a full run, all of which gave an answer."""
    cells = result.get("cells", [])
    failed = [f"{c.get('cell', c.get('case'))}: {c['error']}" for c in cells if "error" in c]
    if failed:
        raise Bad(f"{name}: {len(failed)} cells failed: {failed[0]}")
    if len(cells) != count:
        raise Bad(f"{name}: {len(cells)} cells, not the {count} of a full run")
    return cells


def table(header, rows):
    widths = [max(len(str(row[n])) for row in [header, *rows]) for n in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(str(value).rjust(width) for value, width in zip(row, widths)))
