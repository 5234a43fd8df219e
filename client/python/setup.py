"""Compiles the wire contract into the package; everything else is in pyproject.toml."""

import pathlib

from setuptools import setup

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto"
CONTRACT = PROTO / "attention" / "v1" / "attention.proto"
COMPILED = HERE / "attn_client" / "attention.binpb"


def compile_contract():
    if not CONTRACT.exists():
        if COMPILED.exists():
            return  # a source distribution, which brings it along
        raise SystemExit(f"{CONTRACT} is missing: build in the repository, with pip 21.3 or later")
    from grpc_tools import protoc
    command = ["protoc", f"-I{PROTO}", f"--descriptor_set_out={COMPILED}", str(CONTRACT)]
    if protoc.main(command) != 0:
        raise SystemExit(f"{CONTRACT} does not compile")


compile_contract()
setup()
