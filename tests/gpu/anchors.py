"""What the best peers reached on an NVIDIA H200 (132 multiprocessors, 700 W, 1980 MHz; driver
580.159, CUDA 13.0, 2026-11-29): cuDNN 9.19 and FlashAttention-2 by PyTorch 2.11, FlashAttention-3
of commit 0251105a built for sm_90a. bf16.

anchors.csv: forward and backward, TFLOP/s, by bursts (a pause of 0.5 s, 5 warm-ups, median of 20
calls between events, 256 MB of L2 cleared before each); best_peer is the larger of cuDNN and
FlashAttention-3. anchors_decode.csv: one query, 32 query and 8 KV heads, head_dim 128; GB/s of K
and V, in the same way. No bar is such a figure alone: clocks differ from day to day, so that it
counts as a ratio to cuDNN's, which every run measures anew."""

import csv
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
CUDNN_VERSION = 919  # 9.19: major * 100 + minor
DEVICE = "H200"
# FlashAttention-3 forward, TFLOP/s, 300 calls in a row: head_dim 128, 16,384 tokens, 16 heads.
SUSTAINED_TFLOPS = {"full": 670.0, "causal": 655.0}
# FlashAttention-3, batch 1 with 4,096 keys, by replay of a CUDA graph, L2 not cleared.
DECODE_REPLAY_US = 13.6


def _rows(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def sweep():
    """(pass, head_dim, causal, seqlen): its row, TFLOP/s by name."""
    return {(r["pass"], int(r["head_dim"]), r["causal"] == "1", int(r["seqlen"])):
            {name: float(r[name]) for name in ("flashattention3", "cudnn_9_19", "flashattention2",
                                               "best_peer")} for r in _rows("anchors.csv")}


def decode():
    """(batch, keys): GB/s by name."""
    return {(int(r["batch"]), int(r["keys"])):
            {name: float(r[name]) for name in ("flashattention3", "cudnn_9_19", "flashattention2")}
            for r in _rows("anchors_decode.csv")}


def relative(ours_ms, cudnn_ms, anchor):
    """r: how far ours is ahead of cuDNN of the same run, over how far the best peer was ahead of
    cuDNN. 1 equals the best peer."""
    return cudnn_ms / ours_ms / (anchor["best_peer"] / anchor["cudnn_9_19"])
