"""Attention on a remote attnd as a differentiable function of PyTorch."""

from __future__ import annotations

import torch

from . import checks
from .call import Dropout

_INTEGERS = ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")


def attention(client, q, k, v, *, bias=None, sinks=None, return_lse: bool = False, **arguments):
    """out, or (out, lse), with gradients for q, k, v, bias, sinks by the same server.

    client: attn_client.Client. Tensors and arguments: as of Client.forward, `timeout` included;
    those on a GPU travel by way of host memory. Differentiable once: the gradients have none of
    their own, and say so. Errors: as of Client.forward; ValueError (a gradient is wanted that there
    is none of).
    """
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(f"{name} requires grad; only q, k, v, bias and sinks have gradients")
    # Kept for backward, so what the caller does with his own lists must not matter.
    arguments.update((name, checks.integers(name, arguments[name]))
                     for name in _INTEGERS if arguments.get(name) is not None)
    out, lse = _Attention.apply(client, arguments, q, k, v, bias, sinks)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, client, arguments, q, k, v, bias, sinks):
        result = client.forward(q, k, v, bias=bias, sinks=sinks, **arguments)
        ctx.client, ctx.arguments = client, arguments
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sinks, result.out, result.lse)
        return result.out, result.lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 7
        tensors = (*ctx.saved_tensors, dout, dlse)
        return None, None, *_Gradients.apply(ctx.client, ctx.arguments, *tensors)


class _Gradients(torch.autograd.Function):
    """A function of its own, so that gradients of gradients fail and are not silently 0."""

    @staticmethod
    def forward(ctx, client, arguments, q, k, v, bias, sinks, out, lse, dout, dlse):
        dout = torch.zeros_like(out) if dout is None else dout
        result = client.backward(q, k, v, out, lse, dout, dlse, bias=bias, sinks=sinks, **arguments)
        gradients = (result.dq, result.dk, result.dv, result.dbias, result.dsink)
        return tuple(None if gradient is None else gradient.to(tensor)
                     for gradient, tensor in zip(gradients, (q, k, v, bias, sinks)))

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("attention on a server is differentiable once only")


def scaled_dot_product_attention(client, query, key, value, attn_mask=None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False, **arguments):
    """torch.nn.functional.scaled_dot_product_attention on a remote attnd.

    query: [batch, num_heads, seqlen_q, head_dim]; key, value: with seqlen_k and, with enable_gqa,
    fewer heads; dtypes alike. attn_mask: bool (True: takes part) or float, broadcast to [.., ..,
    seqlen_q, seqlen_k], and sent at that size: for padded keys alone `seqlens_k` is cheaper.
    dropout_p: below 1; the seed is drawn from PyTorch's generator of the CPU. Errors: as of
    attention(); ValueError (a rank other than 4, attn_mask with is_causal, heads that need
    enable_gqa).
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; its rank must be 4")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"{query.shape[1]} heads of query, {key.shape[1]} of key need enable_gqa")
    dropout = None
    if dropout_p != 0:
        dropout = Dropout(dropout_p, int(torch.randint(2 ** 63 - 1, (), device="cpu")))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return attention(client, query, key, value, layout="bhsd", bias=bias, softmax_scale=scale,
                     causal=is_causal, alignment="top-left", dropout=dropout, **arguments)


def _bias(mask, query, key):
    """A mask as attnd takes a bias: [batch or 1, num_heads or 1, seqlen_q, seqlen_k]."""
    if mask.dtype == torch.bool:
        shown = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = shown.masked_fill(~mask, float("-inf"))
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.expand(*mask.shape[:2], query.shape[2], key.shape[2])
