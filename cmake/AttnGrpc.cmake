# gRPC and Protocol Buffers of the distribution, as attn::grpc (gRPC C++ with reflection), attn::protobuf and
# attn::allocator (tcmalloc, the largest single gain for large messages; empty under sanitizers).
find_package(Protobuf REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_program(PROTOC_PROGRAM protoc REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

add_library(attn_protobuf INTERFACE)
add_library(attn::protobuf ALIAS attn_protobuf)
target_link_libraries(attn_protobuf INTERFACE protobuf::libprotobuf)

add_library(attn_grpc INTERFACE)
add_library(attn::grpc ALIAS attn_grpc)
target_link_libraries(attn_grpc INTERFACE gRPC::grpc++ gRPC::grpc++_reflection absl::synchronization
                                          absl::status absl::statusor absl::strings)

add_library(attn_allocator INTERFACE)
add_library(attn::allocator ALIAS attn_allocator)
if(NOT ATTN_SANITIZE)
  find_library(TCMALLOC_LIBRARY NAMES tcmalloc_minimal libtcmalloc_minimal.so.4)
  if(TCMALLOC_LIBRARY)
    target_link_libraries(attn_allocator INTERFACE ${TCMALLOC_LIBRARY})
  else()
    message(WARNING "tcmalloc_minimal not found: large messages will be slower")
  endif()
endif()
