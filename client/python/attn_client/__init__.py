"""attn_client: exact attention, forward and backward, on a remote attnd.

    with attn_client.Client("127.0.0.1:50051") as client:
        result = client.forward(q, k, v, causal=True)   # NumPy or PyTorch in, the same out
        print(result.out.shape, result.path, result.rejections)

attn_client.torch has attention as a differentiable function of PyTorch.
"""

from . import schema
from .aio import AsyncClient
from .arrays import BFloat16, Spec
from .call import BackwardResult, BlockMask, Dropout, ForwardResult
from .client import Client
from .errors import AttentionError
from .transport import Cancellation

__version__ = "0.1.0"
__all__ = ["AsyncClient", "AttentionError", "BFloat16", "BackwardResult", "BlockMask",
           "Cancellation", "Client", "Dropout", "ForwardResult", "Spec", "schema"]
