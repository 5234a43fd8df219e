#!/usr/bin/env python3
"""Writes the Grafana dashboards: the readable source of deploy/grafana/dashboards/*.json.

    make_dashboards.py           write them
    make_dashboards.py --check   say which differ from what lies there; exit status 1 where any does

A dashboard is a list of rows, a row a list of panels, a panel its title, its queries and what they
mean. $instance is the dashboard's variable; PromQL's windows are Grafana's $__rate_interval.
"""

import argparse
import json
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH = 24  # Grafana's grid


# ------------------------------------------------------------------------------------------ queries

def pick(metric, **labels):
    """metric{instance=~"$instance",label="value"}; values that start with ~ are patterns."""
    parts = ['instance=~"$instance"']
    for name, value in labels.items():
        name = name.rstrip("_")
        parts.append(f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"')
    return f"{metric}{{{','.join(parts)}}}"


def rate(metric, by="", **labels):
    """Per second, summed over everything but `by`."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({pick(metric, **labels)}[$__rate_interval]))"


def ratio(part, whole, by=""):
    """part / whole where there is any; each a metric or a (metric, labels) pair."""
    def of(x):
        return rate(x, by) if isinstance(x, str) else rate(x[0], by, **x[1])
    return f"{of(part)} / ({of(whole)} > 0)"


def quantile(q, metric, by="", **labels):
    group = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(metric, group, **labels)})"


def flash(metric, by=""):
    return ratio((metric, {"flash": "true"}), metric, by)


# ------------------------------------------------------------------------------------------- panels

def panel(kind, title, queries, about, unit="short", width=8, height=8, **options):
    """`queries`: [(PromQL, legend)]."""
    return {"kind": kind, "title": title, "queries": queries, "about": about, "unit": unit,
            "width": width, "height": height, **options}


def series(title, queries, about, **options):
    return panel("timeseries", title, queries, about, **options)


def stat(title, query, about, **options):
    return panel("stat", title, [(query, "")], about, **{"width": 4, "height": 4, **options})


GOOD_SHARE = [("red", None), ("orange", 0.5), ("green", 0.9)]
YES = [("red", None), ("green", 1)]


def overview():
    share = {"unit": "percentunit", "limits": (0, 1)}
    return "overview", "attnd: is flash on?", [
        ("Is flash on?", [
            stat("Flash share of FLOPs", flash("attn_flops_total"),
                 "Of the work done, how much ran on a fused path (on a host with GPUs: of the GPU).",
                 thresholds=GOOD_SHARE, **share),
            stat("Flash share of calls", flash("attn_executions_total"),
                 "The same by number of calls.", thresholds=GOOD_SHARE, **share),
            stat("Serving", f"min({pick('attn_healthy')})", "1: all instances answer SERVING.",
                 thresholds=YES),
            stat("Canary", f"min({pick('attn_canary_ok')})",
                 "1: the last call that each server made of itself was right, on every device.",
                 thresholds=YES),
            stat("Self-test", f"min({pick('attn_self_test_passed')})",
                 "1: every path that was tested passed.", thresholds=YES),
            stat("Calls per second", rate("attn_executions_total"), "Attention calls run.",
                 unit="reqps"),
        ]),
        ("How much, and of what", [
            series("Flash share of FLOPs, by pass", [(flash("attn_flops_total", "pass"), "{{pass}}")],
                   "1 where all work of the pass is on flash.", **share),
            series("… by dtype", [(flash("attn_flops_total", "dtype"), "{{dtype}}")],
                   "FP32 is no dtype of tensor cores: expect it off flash on GPUs.", **share),
            series("… by head_dim", [(flash("attn_flops_total", "head_dim"), "{{head_dim}}")],
                   "Ranges of head_dim.", **share),
        ]),
        ("Why not", [
            series("Calls without flash, by reason", [(rate("attn_fallbacks_total", "reason"),
                                                       "{{reason}}")],
                   "The reason of the last flash path that could have taken the call. UNKNOWN is a "
                   "fault.", unit="reqps", stack=True),
            series("All reasons against all paths",
                   [(rate("attn_rejections_total", "path, reason") + " > 0", "{{path}} {{reason}}")],
                   "Every reason of every faster path, of every call. Paths that are not built or "
                   "have no device appear for each.", unit="reqps"),
            series("Calls by path", [(rate("attn_executions_total", "path") + " > 0", "{{path}}")],
                   "What ran.", unit="reqps", stack=True),
        ]),
        ("What else", [
            series("Paths that may be chosen", [(f"min by (path) ({pick('attn_path_available')})",
                                                 "{{path}}")],
                   "0: not built, no device, disabled, or failed its self-test; attn status says which.",
                   limits=(0, 1)),
            series("Calls by status", [(rate("attn_requests_total", "code") + " > 0", "{{code}}")],
                   "INVALID_ARGUMENT is the caller's; INTERNAL is ours.", unit="reqps", stack=True),
            series("Bytes the standard algorithm would move, per byte moved",
                   [(ratio(("attn_bytes_total", {"level": "standard"}),
                           ("attn_bytes_total", {"level": "tile"}), "pass"), "{{pass}}")],
                   "What never building the N×N matrix saves, for the shapes actually served.",
                   unit="none"),
        ]),
    ]


def performance():
    per_kernel = "attn_kernel_seconds_total"
    return "performance", "attnd: performance", [
        ("Rates while kernels run", [
            series("FLOP/s by path", [(ratio("attn_flops_total", per_kernel, "pass, path"),
                                       "{{path}} {{pass}}")],
                   "FLOPs of visible entries over kernel time.", unit="flops"),
            series("FLOP/s by dtype and head_dim",
                   [(ratio("attn_flops_total", per_kernel, "dtype, head_dim"),
                     "{{dtype}} {{head_dim}}")],
                   "Small head_dims reach less.", unit="flops"),
            series("Bytes per second", [
                (ratio(("attn_bytes_total", {"level": "compulsory"}), per_kernel, "pass, path"),
                 "compulsory {{path}} {{pass}}"),
                (ratio(("attn_bytes_total", {"level": "tile"}), per_kernel, "pass, path"),
                 "tile {{path}} {{pass}}")],
                   "Compulsory: each input read and each output written once, which memory moves at "
                   "least. Tile: what the kernels' loops ask for, on a GPU of its L2 cache.",
                   unit="Bps"),
        ]),
        ("Against the roofline", [
            series("Fraction of the device's roofline", [
                (ratio("attn_device_roofline_seconds_total", "attn_device_kernel_seconds_total",
                       "instance, kind, index"), "{{instance}} {{kind}}:{{index}}")],
                   "Time the same work takes at the rates measured at start-up, over kernel time. On a "
                   "CPU the rate is that of its fastest path on a small call, so over 1 is possible.",
                   unit="percentunit"),
            series("… by path and dtype", [
                (ratio("attn_roofline_seconds_total", per_kernel, "path, dtype"),
                 "{{path}} {{dtype}}")],
                   "The same by what ran.", unit="percentunit"),
            series("… now against its own median of a day", [
                (pick("instance_device:attn_roofline:ratio_rate5m"), "now {{kind}}:{{index}}"),
                (pick("instance_device:attn_roofline:median1d"), "median {{kind}}:{{index}}")],
                   "AttnEfficiencyLow fires under half of the median.", unit="percentunit"),
        ]),
        ("Latency", [
            series("Handler time", [
                (quantile(q, "attn_stage_seconds_bucket", "pass", stage="handler"),
                 f"p{q * 100:g} {{{{pass}}}}") for q in (0.5, 0.95, 0.99)],
                   "From the handler's start to the reply's hand-over; the wire is not in it.",
                   unit="s", log=True),
            series("Kernel time", [
                (quantile(q, "attn_stage_seconds_bucket", "pass", stage="kernel"),
                 f"p{q * 100:g} {{{{pass}}}}") for q in (0.5, 0.99)],
                   "On a GPU by its own clock.", unit="s", log=True),
            series("Kernel seconds per second", [
                (rate("attn_device_kernel_seconds_total", "instance, kind, index"),
                 "{{instance}} {{kind}}:{{index}}")],
                   "How busy each device is; over 1 where calls overlap.", unit="none"),
        ]),
        ("The GPUs themselves", [
            series("Clocks", [(pick("attn_device_sm_clock_hertz"), "SM {{index}}"),
                              (pick("attn_device_sm_clock_max_hertz"), "SM {{index}}, highest"),
                              (pick("attn_device_memory_clock_hertz"), "memory {{index}}")],
                   "By NVML; no data without a GPU.", unit="hertz", width=6),
            series("Power", [(pick("attn_device_power_watts"), "{{index}}"),
                             (pick("attn_device_power_limit_watts"), "limit {{index}}")],
                   "At the limit the clocks fall.", unit="watt", width=6),
            series("Temperature", [(pick("attn_device_temperature_celsius"), "{{index}}")],
                   "Of the chip.", unit="celsius", width=6),
            series("Throttled", [
                (f"max by (index, reason) ({pick('attn_device_throttled')})", "{{index}} {{reason}}")],
                   "1 while the clocks are held down, and by what.", limits=(0, 1), width=6),
        ]),
    ]


def capacity():
    return "capacity", "attnd: capacity", [
        ("How full", [
            series("Calls", [(f"sum({pick('attn_inflight_requests')})", "in flight"),
                             (f"sum({pick('attn_queued_requests')})", "of these queued"),
                             (f"sum({pick('attn_inflight_requests_limit')})", "limit")],
                   "Over the limit calls are refused with RESOURCE_EXHAUSTED."),
            series("Bytes", [(f"sum({pick('attn_inflight_bytes')})", "in flight"),
                             (f"sum({pick('attn_queued_bytes')})", "of these queued"),
                             (f"sum({pick('attn_inflight_bytes_limit')})", "limit")],
                   "Tensor and scratch bytes that admitted calls may hold.", unit="bytes"),
            series("Workers", [(f"sum({pick('attn_executor_running')})", "busy"),
                               (f"sum({pick('attn_executor_workers')})", "all")],
                   "Calls that run at the same time."),
        ]),
        ("Waiting", [
            series("Queue time", [
                (quantile(q, "attn_stage_seconds_bucket", stage="queue"), f"p{q * 100:g}")
                for q in (0.5, 0.95, 0.99)],
                   "Admitted, waiting for a worker.", unit="s", log=True),
            series("Refused", [(rate("attn_admission_refusals_total", "cause"), "{{cause}}")],
                   "full: come again; too_large: never; draining: another replica.", unit="reqps"),
            series("Requests that run as one", [
                (ratio("attn_batch_requests_sum", "attn_batch_requests_count", "pass"),
                 "mean {{pass}}"),
                (quantile(0.99, "attn_batch_requests_bucket", "pass"), "p99 {{pass}}")],
                   "1: every request runs alone.", unit="none"),
        ]),
        ("Memory", [
            series("Host memory", [
                (f"sum({pick('attn_buffer_pool_in_use_bytes')})", "pool, in use"),
                (f"sum({pick('attn_buffer_pool_retained_bytes')})", "pool, kept"),
                (f"sum({pick('attn_process_allocator_in_use_bytes')})", "heap, in use"),
                (f"sum({pick('attn_process_allocator_retained_bytes')})", "heap, kept")],
                   "What is kept goes back to the system after 5 s without a call.", unit="bytes"),
            series("Device memory of calls", [
                (pick("attn_device_memory_in_use_bytes"), "{{index}} in use"),
                (pick("attn_device_memory_retained_bytes"), "{{index}} kept"),
                (pick("attn_device_memory_limit_bytes"), "{{index}} limit")],
                   "No data without a GPU.", unit="bytes"),
            series("Device memory of everybody", [
                (pick("attn_device_memory_used_bytes"), "{{index}} used"),
                (pick("attn_device_memory_total_bytes"), "{{index}} all")],
                   "By NVML, other processes included.", unit="bytes"),
        ]),
        ("Devices and wire", [
            series("Lanes in use", [(pick("attn_device_busy_lanes"), "{{index}}")],
                   "Calls under way on each GPU (--device-lanes).", width=6),
            series("Devices by health", [(f"sum by (health) ({pick('attn_devices')})", "{{health}}")],
                   "An unhealthy device takes no calls until attnd is restarted.", width=6),
            series("GPU utilisation", [(pick("attn_device_utilization_ratio"), "{{index}}")],
                   "Share of time with a kernel running, by NVML.", unit="percentunit", width=6),
            series("Tensor bytes", [
                (rate("attn_bytes_total", "level",
                      level="~wire_request|wire_response|host_to_device|device_to_host"),
                 "{{level}}")],
                   "Over the network and over the bus.", unit="Bps", width=6),
        ]),
    ]


STAGES = "parse|gather|queue|device_queue|host_to_device|kernel|device_to_host|reply"


def request():
    def mean(by, **labels):
        return ratio(("attn_stage_seconds_sum", labels), ("attn_stage_seconds_count", labels), by)
    return "request", "attnd: one request's anatomy", [
        ("Where the time of a mean request goes", [
            series("Forward, mean time by stage", [
                (mean("stage", pass_="forward", stage=f"~{STAGES}"), "{{stage}}")],
                   "Stages in order: parse, gather and queue (a stream gathers first), on a GPU "
                   "device_queue, host_to_device, kernel, device_to_host; reply. What a client sees "
                   "beyond their sum is the wire.", unit="s", stack=True, width=12),
            series("Backward, mean time by stage", [
                (mean("stage", pass_="backward", stage=f"~{STAGES}"), "{{stage}}")],
                   "The same for gradients.", unit="s", stack=True, width=12),
        ]),
        ("Share and spread", [
            panel("bargauge", "Share of handler time", [
                (f"{rate('attn_stage_seconds_sum', 'stage', stage='~' + STAGES)}"
                 f" / ignoring(stage) group_left() ({rate('attn_stage_seconds_sum', stage='handler')}"
                 " > 0)", "{{stage}}")],
                  "Each stage's part of all handler time.", unit="percentunit"),
            series("Slowest hundredth, by stage", [
                (quantile(0.99, "attn_stage_seconds_bucket", "stage", stage=f"~{STAGES}"),
                 "{{stage}}")],
                   "p99 of each stage: which one makes the tail.", unit="s", log=True),
            series("Stages against the handler", [
                (rate("attn_stage_seconds_sum", stage=f"~{STAGES}"), "sum of the stages"),
                (rate("attn_stage_seconds_sum", stage="handler"), "handler")],
                   "Seconds per second. Errors have a handler time alone; a stream's handler waits for "
                   "its caller, too.", unit="none"),
        ]),
        ("Distributions", [
            panel("heatmap", "Handler time", [
                (rate("attn_stage_seconds_bucket", "le", stage="handler"), "{{le}}")],
                  "Every request.", unit="s", width=12),
            panel("heatmap", "Kernel time", [
                (rate("attn_stage_seconds_bucket", "le", stage="kernel"), "{{le}}")],
                  "Of requests that ran.", unit="s", width=12),
        ]),
        ("Bytes of a mean request", [
            series("By level", [
                (f"{rate('attn_bytes_total', 'level')} / ignoring(level) group_left() "
                 f"({rate('attn_executions_total')} > 0)", "{{level}}")],
                   "wire, bus, and memory as the models count it: compulsory, tile by tile, and what "
                   "the standard algorithm would move.", unit="bytes", log=True, width=12),
            series("The canary's time", [
                (quantile(0.5, "attn_canary_seconds_bucket", "pass"), "p50 {{pass}}"),
                (ratio("attn_canary_seconds_sum", "attn_canary_seconds_count", "pass"),
                 "mean {{pass}}")],
                   "The same small call again and again: what changes here is the machine, not the "
                   "traffic.", unit="s", width=6),
            series("The canary's age", [(pick("attn_canary_age_seconds"), "{{instance}}"),
                                        (pick("attn_canary_interval_seconds"), "interval")],
                   "Far over its interval: the queue is long or stuck.", unit="s", width=6),
        ]),
    ]


# --------------------------------------------------------------------------------------------- JSON

def _fields(p):
    custom = {}
    if p["kind"] == "timeseries":
        custom = {"lineWidth": 1, "fillOpacity": 25 if p.get("stack") else 5, "showPoints": "never",
                  "stacking": {"mode": "normal" if p.get("stack") else "none", "group": "A"}}
        if p.get("log"):
            custom["scaleDistribution"] = {"type": "log", "log": 10}
    defaults = {"unit": p["unit"], "custom": custom}
    if "limits" in p:
        defaults["min"], defaults["max"] = p["limits"]
    if "thresholds" in p:
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {"mode": "absolute", "steps": [
            {"color": color, "value": value} for color, value in p["thresholds"]]}
    return {"defaults": defaults, "overrides": []}


def _options(kind):
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "stat":
        return {"reduceOptions": reduce, "colorMode": "background", "graphMode": "area",
                "textMode": "value"}
    if kind == "bargauge":
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "gradient"}
    return {"calculate": False, "yAxis": {"unit": "s"}, "color": {"scheme": "Blues", "steps": 32}}


def _panel_json(p, number, x, y):
    targets = [{"datasource": DATASOURCE, "expr": expr, "legendFormat": legend,
                "refId": chr(ord("A") + i), **({"format": "heatmap"} if p["kind"] == "heatmap" else {})}
               for i, (expr, legend) in enumerate(p["queries"])]
    return {"id": number, "type": p["kind"], "title": p["title"], "description": p["about"],
            "datasource": DATASOURCE, "targets": targets, "fieldConfig": _fields(p),
            "options": _options(p["kind"]),
            "gridPos": {"x": x, "y": y, "w": p["width"], "h": p["height"]}}


def dashboard_json(uid, title, rows):
    panels, number, y = [], 1, 0
    for name, row in rows:
        panels.append({"id": number, "type": "row", "title": name, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        number, y, x = number + 1, y + 1, 0
        for p in row:
            panels.append(_panel_json(p, number, x, y))
            number, x = number + 1, x + p["width"]
        if x > WIDTH:
            raise ValueError(f"{title}: row '{name}' is {x} wide")
        y += max(p["height"] for p in row)
    instance = {"name": "instance", "label": "Instance", "type": "query", "datasource": DATASOURCE,
                "query": {"query": "label_values(attn_build_info, instance)", "refId": "instance"},
                "definition": "label_values(attn_build_info, instance)", "multi": True,
                "includeAll": True, "allValue": ".*", "refresh": 2, "sort": 1,
                "current": {"text": ["All"], "value": ["$__all"]}}
    links = [{"type": "dashboards", "title": "attnd", "tags": ["attnd"], "asDropdown": False,
              "includeVars": True, "keepTime": True}]
    return {"uid": f"attn-{uid}", "title": title, "tags": ["attnd"], "schemaVersion": 39, "version": 1,
            "editable": False, "timezone": "browser", "refresh": "15s",
            "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [instance]},
            "annotations": {"list": [{
                "name": "Alerts", "enable": True, "iconColor": "red", "datasource": DATASOURCE,
                "expr": 'ALERTS{alertname=~"Attn.*",alertstate="firing",instance=~"$instance"}',
                "titleFormat": "{{alertname}}", "textFormat": "{{instance}}"}]},
            "links": links, "panels": panels}


def dashboards():
    """{file name: text}."""
    texts = {}
    for make in (overview, performance, capacity, request):
        uid, title, rows = make()
        data = dashboard_json(uid, title, rows)
        texts[f"{uid}.json"] = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    return texts


def main():
    parser = argparse.ArgumentParser(description=re.sub(r"\n\n.*", "", __doc__, flags=re.S))
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    arguments = parser.parse_args()
    stale = []
    wanted = dashboards()
    for name, text in wanted.items():
        path = FOLDER / name
        if arguments.check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    stale += [p.name for p in FOLDER.glob("*.json") if p.name not in wanted]
    if arguments.check and stale:
        sys.exit(f"not what make_dashboards.py writes: {', '.join(sorted(stale))}")
    print(f"{len(wanted)} dashboards {'are current' if arguments.check else 'written'}")


if __name__ == "__main__":
    main()
