// Send buffers of Unix sockets.
#ifndef ATTN_PROTO_WIRE_UNIX_SOCKET_H_
#define ATTN_PROTO_WIRE_UNIX_SOCKET_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>

namespace attn::wire {

// What is asked of the system for each Unix socket; it doubles the number for its own accounting
// and allows at most net.core.wmem_max (4 MiB since Linux 6.17, 208 KiB before). A connection whose
// peer does not read holds so much kernel memory at most.
//
// Why: gRPC fills the buffer, waits until three quarters of it have been read, and is then woken,
// which takes so long that the reader meanwhile finds the rest of it and then nothing. With the
// system's 208 KiB a message of 64 MiB is 310 such turns on both sides. Large tensors both ways
// over a Unix socket: 76 ms before, 65 to 71 after (tests/bench/run.sh rpc-throughput). TCP sizes
// its buffers itself. Unit: bytes.
inline constexpr int kUnixSendBufferBytes = 512 << 10;

// Makes it so for the connections of a channel, or of a server; sockets of other kinds are left
// alone, and so is everything with a gRPC whose interface for it is not known here.
void EnlargeUnixSendBuffers(grpc::ChannelArguments* arguments);
void EnlargeUnixSendBuffers(grpc::ServerBuilder* builder);

}  // namespace attn::wire

#endif  // ATTN_PROTO_WIRE_UNIX_SOCKET_H_
