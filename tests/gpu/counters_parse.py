"""What Nsight Compute counted, summed for each call."""

import csv
import io

# Sectors are 32 bytes. srcunit_tex: between the multiprocessors' L1 and L2.
SECTOR_BYTES = 32
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "xbar_to_l1_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1_to_xbar_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_red_sectors": "lts__t_sectors_srcunit_tex_op_red.sum",
    "l2_atom_sectors": "lts__t_sectors_srcunit_tex_op_atom.sum",
}
MARKER = "FillFunctor"  # of the torch kernel that stands before each call


def parse(text, calls):
    """The kernels of each of `calls` calls in ncu's CSV."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, rows = rows[0], rows[1:]
    groups = []
    for row in rows:
        if MARKER in row["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append({"kernel": row["Kernel Name"].split("(")[0][-90:],
                               **{name: number(row, units, metric)
                                  for name, metric in METRICS.items() if metric in row}})
    if len(groups) != calls:
        raise RuntimeError(f"ncu shows {len(groups)} calls, {calls} ran")
    return groups


def merge(runs):
    """The same calls, measured once for each set of metrics, as one."""
    merged = [[dict(kernel) for kernel in call] for call in runs[0]]
    for run in runs[1:]:
        for call, more in zip(merged, run):
            if [k["kernel"] for k in call] != [k["kernel"] for k in more]:
                raise RuntimeError("two runs of a call launched different kernels")
            for kernel, other in zip(call, more):
                kernel.update(other)
    return merged


SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "": 1}


def number(row, units, metric):
    value = row.get(metric, "").replace(",", "")
    if value in ("", "n/a", "nan"):
        return None
    return float(value) * SCALE[units[metric]]


def summed(plan, kernels):
    """What a call moved, beside its model."""
    def total(*names):
        values = [k.get(n) for k in kernels for n in names]
        return None if not values or None in values else sum(values)

    read, written = total("xbar_to_l1_bytes"), total("l1_to_xbar_bytes")
    sectors = total("l2_read_sectors", "l2_write_sectors", "l2_red_sectors", "l2_atom_sectors")
    model = plan["plan"]
    result = {**plan, "kernels": kernels, "dram_bytes": total("dram_read", "dram_write"),
              "l2_slices_bytes": sectors and SECTOR_BYTES * sectors}
    if read and written:
        result.update(l2_to_sm_read_bytes=read, l2_to_sm_write_bytes=written,
                      l2_to_sm_bytes=read + written,
                      model_over_l2=model["tile_bytes"] / (read + written),
                      model_loaded_over_l2_read=model["tile_loaded_bytes"] / read,
                      model_stored_over_l2_write=model["tile_stored_bytes"] / written)
    return result
