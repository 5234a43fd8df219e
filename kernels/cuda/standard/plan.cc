#include "kernels/cuda/standard/plan.h"

#include <algorithm>
#include <limits>

namespace attn::cuda::standard {
namespace {

using Wide = unsigned __int128;

// NVIDIA's recommendation for Hopper; source: cuBLAS 13, "cublasSetWorkspace".
constexpr int64_t kBlasBytes = int64_t{32} << 20;

// Matrices of one launch: a grid has at most 65535 blocks along y and z.
constexpr int64_t kMaxMatrices = 32768;

int64_t Clamp(Wide x) {
  return static_cast<int64_t>(std::min<Wide>(x, std::numeric_limits<int64_t>::max()));
}

Wide Align256(Wide x) { return (x + 255) / 256 * 256; }

bool SameLengths(const Sequence& a, const Sequence& b) {
  return a.rows_q == b.rows_q && a.rows_k == b.rows_k && a.len_q == b.len_q && a.len_k == b.len_k;
}

// Pieces of n as even as can be, none above `most`.
int64_t EvenPiece(int64_t n, int64_t most) {
  const int64_t pieces = (n + most - 1) / most;
  return (n + pieces - 1) / pieces;
}

}  // namespace

std::vector<SequenceRun> FindRuns(const AttentionProblem& p) {
  std::vector<SequenceRun> runs;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = p.sequences[b];
    if (s.len_q == 0) continue;
    // Equal rows make equal distances: packed sequences follow each other without gaps.
    const bool extends = !runs.empty() && runs.back().first + runs.back().count == b &&
                         SameLengths(s, p.sequences[b - 1]);
    if (extends) {
      ++runs.back().count;
    } else {
      runs.push_back({b, 1});
    }
  }
  return runs;
}

bool DbiasSumsBatch(const AttentionProblem& p) {
  return p.bias && p.layout == Layout::kBshd && p.bias->batch == 1 && p.batch > 1;
}

bool DbiasSumsHeads(const AttentionProblem& p) {
  return p.bias && p.bias->heads == 1 && p.num_heads > 1;
}

int64_t ScoreMatrices(const AttentionProblem& p, Pass pass) {
  if (pass == Pass::kForward) return 1;
  const bool shared = DbiasSumsBatch(p) || DbiasSumsHeads(p);
  return shared && p.softcap > 0 ? 3 : 2;
}

DType ProbabilityType(const AttentionProblem& p, Pass pass, const Sequence& s) {
  const bool unsplit = pass == Pass::kForward && p.bias && s.len_k > kMaxRowInRegisters;
  return s.len_k <= kFewKeys || unsplit ? DType::kFp32 : p.dtype;
}

bool SplitsProbabilities(const AttentionProblem& p, const Sequence& s) {
  return p.bias && ProbabilityType(p, Pass::kForward, s) != DType::kFp32;
}

bool NeedsAccumulators(const AttentionProblem& p) {
  return p.group() > 1 && p.out_dtype != DType::kFp32;
}

bool HasIdleRows(const AttentionProblem& p) {
  return std::any_of(p.sequences.begin(), p.sequences.end(), [](const Sequence& s) {
    return s.len_q < s.rows_q || s.len_k < s.rows_k || s.len_q == 0 || s.len_k == 0;
  });
}

int64_t Plan::HeadBytes(const Sequence& s) const {
  const Wide scores = Wide(s.len_q) * ScoreStride(s.len_k) * 4 * score_matrices_;
  const Wide factors = pass_ == Pass::kForward ? Wide(s.len_q) * 4 : 0;
  return Clamp(scores + factors + Wide(OutSums(s)) * 4);
}

int64_t Plan::OutSums(const Sequence& s) const {
  const bool sums = pass_ == Pass::kForward && p_.out_dtype != DType::kFp32;
  return sums ? Clamp(Wide(s.len_q) * p_.head_dim_v) : 0;
}

int64_t Plan::FactorBytes(const Chunk& chunk) const {
  if (pass_ == Pass::kBackward) return 0;
  return Clamp(Align256(Wide(chunk.matrices()) * p_.sequences[chunk.batch0].len_q * 4));
}

int64_t Plan::OutBytes(const Chunk& chunk) const {
  return Clamp(Align256(Wide(chunk.matrices()) * OutSums(p_.sequences[chunk.batch0]) * 4));
}

int64_t Plan::KvHeadBytes(const Sequence& s) const {
  if (!accumulators_) return 0;
  return Clamp(Wide(s.len_k) * (p_.head_dim + p_.head_dim_v) * 4);
}

int64_t Plan::ScoreBytes(const Chunk& chunk) const {
  const Sequence& s = p_.sequences[chunk.batch0];
  return Clamp(Align256(Wide(chunk.matrices()) * s.len_q * ScoreStride(s.len_k) * 4));
}

int64_t Plan::DkBytes(const Chunk& chunk) const {
  if (!accumulators_) return 0;
  const int64_t len_k = p_.sequences[chunk.batch0].len_k;
  return Clamp(Align256(Wide(chunk.batch) * chunk.kv_heads * len_k * p_.head_dim * 4));
}

int64_t Plan::DvBytes(const Chunk& chunk) const {
  if (!accumulators_) return 0;
  const int64_t len_k = p_.sequences[chunk.batch0].len_k;
  return Clamp(Align256(Wide(chunk.batch) * chunk.kv_heads * len_k * p_.head_dim_v * 4));
}

int64_t Plan::ChunkBytes(const Chunk& chunk) const {
  return Clamp(Wide(ScoreBytes(chunk)) * score_matrices_ + DkBytes(chunk) + DvBytes(chunk) +
               OutBytes(chunk) + FactorBytes(chunk));
}

// The budget leaves room for what aligning five parts to 256 bytes can add.
Chunk Plan::Largest(const SequenceRun& run, int64_t budget) const {
  const Sequence& s = p_.sequences[run.first];
  const int64_t group = p_.group();
  const int64_t room = budget - 5 * 256;
  const Wide head = HeadBytes(s), accumulators = KvHeadBytes(s);
  const Wide kv_head = head * group + accumulators;
  const auto most = [room](Wide each) {
    return room <= 0 ? 0 : Clamp(Wide(room) / std::max<Wide>(1, each));
  };

  const int64_t sequences =
      std::min(most(kv_head * p_.num_kv_heads), kMaxMatrices / std::max<int64_t>(1, p_.num_heads));
  if (sequences > 0) {
    return {.batch = EvenPiece(run.count, std::min(sequences, run.count)),
            .kv_heads = p_.num_kv_heads,
            .group_heads = group};
  }
  const int64_t kv_heads = std::min(most(kv_head), kMaxMatrices / group);
  if (kv_heads > 0) {
    return {.batch = 1,
            .kv_heads = EvenPiece(p_.num_kv_heads, std::min(kv_heads, p_.num_kv_heads)),
            .group_heads = group};
  }
  if (Wide(std::max<int64_t>(0, room)) < head + accumulators) return {};
  const int64_t heads = std::clamp(Clamp((Wide(room) - accumulators) / std::max<Wide>(1, head)),
                                   int64_t{1}, kMaxMatrices);
  return {.batch = 1, .kv_heads = 1, .group_heads = EvenPiece(group, std::min(heads, group))};
}

Plan::Plan(const AttentionProblem& p, Pass pass, int64_t limit_bytes)
    : p_(p),
      pass_(pass),
      limit_bytes_(limit_bytes),
      score_matrices_(ScoreMatrices(p, pass)),
      accumulators_(pass == Pass::kBackward && NeedsAccumulators(p)) {
  Wide fixed = 0;
  if (pass == Pass::kBackward) {
    fixed += Align256(Wide(LseElements(p)) * 4);
    if (p.has_sinks) fixed += Align256(Wide(p.batch) * p.num_heads * 8);
  }
  const std::vector<SequenceRun> runs = FindRuns(p);
  Wide one_head = 0;
  for (const SequenceRun& run : runs) {
    const Sequence& s = p.sequences[run.first];
    one_head = std::max(one_head, Wide(HeadBytes(s)) + KvHeadBytes(s) + 5 * 256);
  }
  const int64_t least = Clamp(fixed + one_head);
  if (least > limit_bytes) {
    bytes_ = least;
    return;
  }
  // cuBLAS does without, slower; it never takes the place of a chunk.
  if (!runs.empty()) blas_bytes_ = std::min(kBlasBytes, (limit_bytes - least) / 4 / 256 * 256);
  delta_at_ = blas_bytes_;
  sinks_at_ = delta_at_ + (pass == Pass::kBackward ? Clamp(Align256(Wide(LseElements(p)) * 4)) : 0);
  chunk_at_ = Clamp(Wide(blas_bytes_) + fixed);
  int64_t chunk_bytes = 0;
  for (const SequenceRun& run : runs) {
    Chunk chunk = Largest(run, limit_bytes - chunk_at_);
    chunk.batch0 = run.first;
    chunk_bytes = std::max(chunk_bytes, ChunkBytes(chunk));
  }
  bytes_ = Clamp(Wide(chunk_at_) + chunk_bytes);
}

std::vector<Chunk> Plan::Chunks(const SequenceRun& run) const {
  const Chunk most = Largest(run, limit_bytes_ - chunk_at_);
  std::vector<Chunk> chunks;
  for (int64_t b = 0; b < run.count; b += most.batch) {
    for (int64_t kv = 0; kv < p_.num_kv_heads; kv += most.kv_heads) {
      for (int64_t g = 0; g < p_.group(); g += most.group_heads) {
        chunks.push_back({.batch0 = run.first + b,
                          .batch = std::min(most.batch, run.count - b),
                          .kv0 = kv,
                          .kv_heads = std::min(most.kv_heads, p_.num_kv_heads - kv),
                          .group0 = g,
                          .group_heads = std::min(most.group_heads, p_.group() - g)});
      }
    }
  }
  return chunks;
}

}  // namespace attn::cuda::standard
