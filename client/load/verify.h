// Holds replies against attention computed here, in float64, by the project's exactness rule
// (tests/reference/README.md).
#ifndef ATTN_CLIENT_LOAD_VERIFY_H_
#define ATTN_CLIENT_LOAD_VERIFY_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/load/target.h"
#include "kernels/api/mutex.h"
#include "kernels/api/spec.h"
#include "tests/reference/reference.h"

namespace attn::load {

// The call that an entry makes, in the words of the attention library. Made from what the entry
// sends, not from what a server made of it. Errors: INVALID_ARGUMENT.
absl::StatusOr<AttentionSpec> SpecOf(const MixEntry& entry);

struct Verification {
  int64_t replies = 0;                        // held against the reference
  int64_t wrong = 0;                          // of these, with an element beyond its bound
  int64_t skipped = 0;                        // not looked at, because the queue was full
  std::map<std::string, double> worst_ratio;  // error / bound by tensor; at most 1 is right
  std::vector<std::string> faults;            // the first few, with their trace ids
};

// All inputs of an entry are the same in every call, so the reference is computed once per entry,
// before the load, and a reply costs a comparison, on a thread of the verifier's own.
class Verifier {
 public:
  // Computes the references on all cores; takes long for long sequences. Errors: INVALID_ARGUMENT:
  // an entry is no valid call.
  static absl::StatusOr<std::unique_ptr<Verifier>> Create(const std::vector<MixEntry>& entries);
  ~Verifier();

  // Takes results as CallReply::results has them, to compare them in its own time. Thread-safe.
  void Offer(uint32_t entry, std::vector<client::HostTensor> results, const std::string& trace_id);

  // What has come of all replies so far; waits for those in the queue. Thread-safe.
  Verification Result();

 private:
  struct Expected {
    std::string entry;
    std::vector<std::pair<std::string, reference::Tensor>> tensors;
  };
  struct Item {
    uint32_t entry = 0;
    std::vector<client::HostTensor> results;
    std::string trace_id;
    size_t bytes = 0;
  };

  Verifier() = default;
  void Run();
  void Check(const Item& item, Verification* result) const;

  std::vector<Expected> expected_;
  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> queue_ ATTN_GUARDED_BY(mutex_);
  size_t queue_bytes_ ATTN_GUARDED_BY(mutex_) = 0;
  bool busy_ ATTN_GUARDED_BY(mutex_) = false;
  bool stop_ ATTN_GUARDED_BY(mutex_) = false;
  Verification result_ ATTN_GUARDED_BY(mutex_);
};

}  // namespace attn::load

#endif  // ATTN_CLIENT_LOAD_VERIFY_H_
