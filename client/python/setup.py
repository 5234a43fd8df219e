"""Compiles the wire contract into the package; everything else is in pyproject.toml."""

import pathlib

from setuptools import setup

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto"
COMPILED = HERE / "attn_client" / "attention.binpb"


def compile_contract():
    if not PROTO.is_dir() and COMPILED.exists():
        return  # a source distribution, which brings it along
    from grpc_tools import protoc
    if protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={COMPILED}",
                    str(PROTO / "attention" / "v1" / "attention.proto")]) != 0:
        raise SystemExit("attention.proto does not compile")


compile_contract()
setup()
