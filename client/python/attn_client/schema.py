"""The messages and enum values of attention.v1, documented in attention.proto.

Made at run time from the compiled contract, so they work with any protobuf from 3.20 on, whichever
protoc compiled it, and beside modules that a program generated for itself.
"""

import pathlib

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

SERVICE = "attention.v1.Attention"
_FILE = "attention/v1/attention.proto"


def _load():
    compiled = pathlib.Path(__file__).with_name("attention.binpb").read_bytes()
    # A pool of its own: the default one refuses a second, different "attention/v1/attention.proto".
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(file.SerializeToString())
    if hasattr(message_factory, "GetMessageClass"):
        message_class = message_factory.GetMessageClass
    else:  # before protobuf 4.22
        message_class = message_factory.MessageFactory(pool).GetPrototype
    found = {}
    file = pool.FindFileByName(_FILE)
    for name, message in file.message_types_by_name.items():
        found[name] = message_class(message)
    for name, enum in file.enum_types_by_name.items():
        found[name] = enum_type_wrapper.EnumTypeWrapper(enum)
        found.update((value.name, value.number) for value in enum.values)
    return found


globals().update(_load())


def name_of(enum, number: int) -> str:
    """A value's name without its prefix; the number where a newer server knows more values."""
    try:
        return enum.Name(number).partition("_")[2]
    except ValueError:
        return str(number)
