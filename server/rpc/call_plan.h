// What a request header asks for, worked out once: the problem, its path, the sizes of everything
// that comes in and goes out. Calls whose headers are the same bytes share one.
#ifndef ATTN_SERVER_RPC_CALL_PLAN_H_
#define ATTN_SERVER_RPC_CALL_PLAN_H_

#include <google/protobuf/message_lite.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/backend.h"
#include "kernels/api/mutex.h"
#include "kernels/api/path.h"
#include "kernels/api/problem.h"
#include "server/rpc/convert.h"

namespace attn::server {

struct ServiceContext;

// What a call computes and moves, for its report.
struct CallCost {
  uint64_t flops = 0;
  TileModel model;
  uint64_t compulsory_bytes = 0;
  uint64_t standard_bytes = 0;
};

// Takes time in the number of query rows and of block-mask entries. With a block mask its contents
// must be bound to the problem.
CallCost CostOf(const AttentionProblem& problem, Pass pass, const Backend& backend);

struct CallPlan {
  struct Output {
    DType dtype = DType::kFp32;
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in the memory of all outputs; aligned as BufferPool aligns
  };

  std::string_view path_name() const {
    return choice.path ? Name(*choice.path) : std::string_view();
  }
  uint64_t InputBytes() const;
  uint64_t OutputBytes() const;

  ConvertedHeader header;
  AttentionProblem problem;    // option tensors are not bound
  uint64_t paths_version = 0;  // PathTable::version() that the choice was made from
  PathChoice choice;
  std::string rejections;  // "flash_sm90:NO_CUDA_DEVICE,…", for trailing metadata
  std::string kernel;
  int64_t workspace_bytes = 0;          // of host memory
  std::vector<uint64_t> payload_sizes;  // what the tensors need
  std::array<Output, 5> outputs;        // in the order of the response header
  int num_outputs = 0;
  // Of a unary call: q, k and v stay in the message until the backend reads them.
  bool reads_inputs = false;
  std::unique_ptr<google::protobuf::MessageLite> response_header;
  // Counting visible entries takes time in the number of rows, so this is here for small calls
  // only; of others it is counted where they run, after they were admitted. With a block mask it is
  // what an all-visible one would cost.
  std::optional<CallCost> cost;
};

// Bytes of inputs and outputs up to which a plan holds its cost.
inline constexpr uint64_t kSmallCallBytes = uint64_t{256} << 10;

// Parses, converts and validates the header, and chooses the path. Where that fails, `plan` holds
// what was worked out until then: the rejections where no path is allowed. Errors:
// INVALID_ARGUMENT, UNIMPLEMENTED, RESOURCE_EXHAUSTED (over --max-request-bytes),
// FAILED_PRECONDITION (lists every reason). Thread-safe.
absl::Status MakeCallPlan(const ServiceContext& context, Pass pass, std::string_view serialized,
                          CallPlan* plan);

// The plans of recent headers. A caller in a loop sends the same header over and over, and of a
// tiny call a quarter of the server's time is making its plan. Plans depend on nothing but the
// header, settings that stand while the server runs, and the path table: see
// CallPlan::paths_version.
//
// Bounded: for each pass at most 2 * kGeneration plans, each of a header of at most kMaxHeaderBytes
// and a problem of at most kMaxSequences sequences, so some 10 KB each. Thread-safe.
class CallPlanCache {
 public:
  static constexpr size_t kGeneration = 16;
  static constexpr size_t kMaxHeaderBytes = 1024;
  static constexpr size_t kMaxSequences = 64;

  // Null: not held.
  std::shared_ptr<const CallPlan> Find(Pass pass, std::string_view serialized)
      ATTN_EXCLUDES(mutex_);
  // Keeps the plan, where it is small enough.
  void Add(Pass pass, std::string_view serialized, std::shared_ptr<const CallPlan> plan)
      ATTN_EXCLUDES(mutex_);
  size_t size() const ATTN_EXCLUDES(mutex_);

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Plans =
      std::unordered_map<std::string, std::shared_ptr<const CallPlan>, Hash, std::equal_to<>>;
  // What was used since `young` was last full is in `young`; the generation before it is in `old`.
  struct Generations {
    Plans young, old;
  };

  void Insert(Generations& generations, std::string key, std::shared_ptr<const CallPlan> plan,
              Plans* surplus) ATTN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::array<Generations, 2> passes_ ATTN_GUARDED_BY(mutex_);  // by pass
};

}  // namespace attn::server

#endif  // ATTN_SERVER_RPC_CALL_PLAN_H_
