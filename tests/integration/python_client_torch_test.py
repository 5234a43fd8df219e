"""attn_client.torch: attention on a real attnd as a function of PyTorch, against PyTorch's own."""

import importlib.util
import unittest

import attn_client
import numpy as np

from harness.readme import python_blocks
from harness.server import Attnd

if importlib.util.find_spec("torch"):
    import attn_client.torch as remote
    import torch


@unittest.skipUnless(importlib.util.find_spec("torch"), "PyTorch is not installed")
class PythonClientTorchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd())
        cls.client = cls.enterClassContext(attn_client.Client(cls.server.target))

    def tensors(self, dtype, *shapes):
        generator = torch.Generator().manual_seed(7)
        return [torch.randn(shape, generator=generator).to(dtype).requires_grad_()
                for shape in shapes]

    def check(self, ours, theirs, tensors, tolerance):
        """Results and gradients of two functions of the same tensors."""
        dout, found = None, []
        for function in (ours, theirs):
            for tensor in tensors:
                tensor.grad = None
            out = function()
            dout = torch.randn(out.shape).to(out.dtype) if dout is None else dout
            out.backward(dout)
            found.append([out.detach()] + [tensor.grad for tensor in tensors])
        for a, b in zip(*found):
            self.assertEqual(a.dtype, b.dtype)
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)

    def test_scaled_dot_product_attention_is_pytorchs(self):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1e-2),
                                 (torch.bfloat16, 6e-2)):
            q, k, v = self.tensors(dtype, (2, 4, 19, 32), (2, 4, 23, 32), (2, 4, 23, 32))
            mask, = self.tensors(dtype, (4, 19, 23))
            shown = torch.rand(2, 1, 19, 23) < 0.7
            shown[..., 0] = True  # a row that sees nothing was NaN in some versions of PyTorch
            for arguments, more in (({}, []), ({"is_causal": True}, []), ({"scale": 0.3}, []),
                                    ({"attn_mask": mask}, [mask]), ({"attn_mask": shown}, [])):
                with self.subTest(dtype=dtype, **{name: True for name in arguments}):
                    self.check(lambda: remote.scaled_dot_product_attention(
                                   self.client, q, k, v, **arguments),
                               lambda: sdpa(q, k, v, **arguments), [q, k, v, *more], tolerance)
        with self.assertRaisesRegex(ValueError, "exclude each other"):
            remote.scaled_dot_product_attention(self.client, q, k, v, attn_mask=shown,
                                                is_causal=True)
        with self.assertRaisesRegex(ValueError, r"key has shape \[4, 23, 32\]; its rank must be 4"):
            remote.scaled_dot_product_attention(self.client, q, k[0], v[0])
        for p in (-0.5, float("nan"), 1.0):
            with self.assertRaisesRegex(attn_client.AttentionError, "dropout.p"):
                remote.scaled_dot_product_attention(self.client, q, k, v, dropout_p=p)
        with self.assertRaisesRegex(ValueError, "enable_gqa"):
            remote.scaled_dot_product_attention(self.client, q, k[:, :2], v[:, :2])

    def test_gradients_of_every_differentiable_input(self):
        q, k, v, bias, sinks = self.tensors(torch.float32, (1, 9, 4, 16), (1, 12, 2, 16),
                                            (1, 12, 2, 24), (1, 4, 9, 12), (4,))

        def ours():
            out, lse = remote.attention(self.client, q, k, v, bias=bias, sinks=sinks,
                                        return_lse=True)
            return torch.cat([out.flatten(), lse.flatten()])

        def theirs():
            keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
            scores = torch.einsum("bihd,bjhd->bhij", q, keys) / 4 + bias
            scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, 9, 1)], -1)
            out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], values)
            return torch.cat([out.flatten(), scores.logsumexp(-1).flatten()])

        self.check(ours, theirs, [q, k, v, bias, sinks], 2e-5)

    def test_second_derivatives_fail(self):
        q, k, v = self.tensors(torch.float32, (1, 9, 2, 16), (1, 12, 2, 16), (1, 12, 2, 16))
        out = remote.attention(self.client, q, k, v)
        dq, = torch.autograd.grad(out.sum(), q, create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "differentiable once"):
            dq.pow(2).sum().backward()

    def test_arguments_are_as_they_were_in_forward(self):
        q, k, v = self.tensors(torch.float32, (2, 9, 2, 16), (2, 12, 2, 16), (2, 12, 2, 16))
        gradients = []
        for change in (False, True):
            lengths = np.array([5, 12])
            out = remote.attention(self.client, q, k, v, seqlens_k=lengths)
            if change:
                lengths[:] = 1
            gradients.append(torch.autograd.grad(out.sum(), q)[0])
        self.assertTrue(torch.equal(*gradients))
        with self.assertRaisesRegex(ValueError, "alibi_slopes requires grad"):
            remote.attention(self.client, q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))

    def test_views_of_any_kind(self):
        base = torch.randn(2, 16, 4, 64).to(torch.bfloat16)
        for x in (base.transpose(1, 2), base[..., ::2], base[:, ::2], base[:, :0],
                  base[:, :, :1].expand(2, 16, 4, 64),
                  torch.randn(2, 4, 8, 3, dtype=torch.complex64).conj().imag):
            plain = [x.contiguous().resolve_neg().clone() for _ in range(3)]
            expected = self.client.forward(*plain)
            found = self.client.forward(x, x, x)
            self.assertTrue(torch.equal(found.out, expected.out))
            self.assertEqual(self.client.plan(x, x, x).path, found.path)
        with self.assertRaisesRegex(TypeError, "q cannot be read"):
            self.client.forward(torch.empty(1, 2, 1, 4, device="meta"), base, base)

    def test_gradients_of_lse_alone(self):
        q, k, v = self.tensors(torch.float32, (1, 9, 2, 16), (1, 12, 2, 16), (1, 12, 2, 16))
        lse = remote.attention(self.client, q, k, v, return_lse=True)[1]
        lse.sum().backward()
        p = (torch.einsum("bihd,bjhd->bhij", q, k) / 4).softmax(-1)
        torch.testing.assert_close(q.grad, torch.einsum("bhij,bjhd->bihd", p, k) / 4)
        self.assertEqual(float(v.grad.abs().max()), 0)

    def test_the_readmes_example_runs(self):
        names = {"client": self.client}
        exec(python_blocks("client/python/README.md")[2], names)
        self.assertEqual([x.grad.shape for x in (names["q"], names["k"], names["v"])],
                         [(2, 1024, 8, 64)] * 3)

    def test_dropout_is_repeated_in_backward(self):
        v, = self.tensors(torch.float32, (1, 1, 64, 64))
        q = torch.zeros(1, 1, 64, 64)
        out = remote.scaled_dot_product_attention(self.client, q, q, v, dropout_p=0.5)
        # out = D v with D constant, so its gradient for ones is the sums of D's columns.
        out.sum().backward()
        torch.testing.assert_close((v.grad * v).sum(), out.sum(), rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    unittest.main()
