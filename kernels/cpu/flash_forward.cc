#include "kernels/cpu/flash_forward.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/stop_flag.h"

namespace attn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Up to so many keys, the transposition of q and of the output costs more than all arithmetic (half
// the time of a call with one key), so both stay row by row.
constexpr int64_t kFewKeys = 8;

// Where q, k and v are: each pointer is that tensor's element number `first`.
struct InputView {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t q_first = 0, k_first = 0, v_first = 0;
};

// Each tensor's part of a window begins at a multiple of this. Unit: bytes.
constexpr int64_t kWindowAlignment = 64;

// What one worker keeps on chip for a tile.
struct Buffers {
  struct PanelState {
    float *q, *o;         // transposed: [head_dim, cols], [head_dim_v, cols]
    float *m, *l;         // [kPanelRows]
    bool started, shown;  // o holds something; the block mask shows the key tile at hand
  } panels[kMaxTilePanels];
  float *k, *v;                       // [kKeyTile, padded head_dim], [kKeyTile, padded head_dim_v]
  float *s, *aux, *rows;              // scores; bias or dropout tile; rows on their way in or out
  float *alpha, *sink, *scale, *lse;  // [kPanelRows]
  float* window;  // the inputs of some sequences, where they are read in windows

  static int64_t RowWidth(const AttentionProblem& p) {
    return std::max(kKeyTile, RoundUp(std::max(p.head_dim, p.head_dim_v), kColumnStep));
  }
  // The same sizes in the same order as the constructor takes.
  static int64_t Floats(const AttentionProblem& p) {
    const int64_t d = RoundUp(p.head_dim, kColumnStep), dv = RoundUp(p.head_dim_v, kColumnStep);
    return kMaxTilePanels * (d + dv + 2) * kPanelRows + kKeyTile * (d + dv) +
           2 * kKeyTile * kPanelRows + kPanelRows * RowWidth(p) + 4 * kPanelRows;
  }
  Buffers(const AttentionProblem& p, int64_t window_floats) {
    Scratch scratch(Floats(p) + window_floats);
    const int64_t d = RoundUp(p.head_dim, kColumnStep), dv = RoundUp(p.head_dim_v, kColumnStep);
    for (PanelState& panel : panels) {
      panel.q = scratch.Take(d * kPanelRows);
      panel.o = scratch.Take(dv * kPanelRows);
      panel.m = scratch.Take(kPanelRows);
      panel.l = scratch.Take(kPanelRows);
    }
    k = scratch.Take(kKeyTile * d);
    v = scratch.Take(kKeyTile * dv);
    s = scratch.Take(kKeyTile * kPanelRows);
    aux = scratch.Take(kKeyTile * kPanelRows);
    rows = scratch.Take(kPanelRows * RowWidth(p));
    for (float** column : {&alpha, &sink, &scale, &lse}) *column = scratch.Take(kPanelRows);
    window = scratch.Take(window_floats);
  }
};

class ForwardWorker {
 public:
  ForwardWorker(const AttentionProblem& p, const ForwardTensors& tensors, const ForwardPlan& plan,
                const RunContext& context, StopFlag& stop, int64_t window_floats = 0)
      : p_(p),
        tensors_(tensors),
        in_{.q = tensors.q, .k = tensors.k, .v = tensors.v},
        plan_(plan),
        workspace_(reinterpret_cast<float*>(context.workspace.data())),
        stop_(stop),
        traffic_(context.counters),
        d_(RoundUp(p.head_dim, kColumnStep)),
        dv_(RoundUp(p.head_dim_v, kColumnStep)),
        buffers_(p, window_floats) {}

  // Brings sequences [begin, end) into this worker's window; the tiles that follow are of these.
  void ReadWindow(const InputReader& reader, const InputWindows& windows, int64_t begin,
                  int64_t end) {
    const int64_t size = SizeOf(p_.dtype);
    auto* at = reinterpret_cast<std::byte*>(buffers_.window);
    const auto read = [&](InputReader::Tensor tensor, int64_t batch_stride, int64_t extent,
                          const void** data, int64_t* first) {
      *data = at;
      *first = begin * batch_stride;
      const int64_t bytes = ((end - 1 - begin) * batch_stride + extent) * size;
      reader.Read(tensor, static_cast<uint64_t>(*first * size), static_cast<uint64_t>(bytes), at);
      at += RoundUp(bytes, kWindowAlignment);
    };
    read(InputReader::Tensor::kQ, p_.q.batch, windows.q_extent, &in_.q, &in_.q_first);
    read(InputReader::Tensor::kK, p_.k.batch, windows.k_extent, &in_.k, &in_.k_first);
    read(InputReader::Tensor::kV, p_.v.batch, windows.v_extent, &in_.v, &in_.v_first);
  }

  // A whole tile, or one split of it, whose partial result goes to the workspace.
  void RunTile(const ForwardTile& tile, int64_t tile_number, int64_t split) {
    const KeyRange keys = plan_.TileKeys(p_, tile, split);
    if (plan_.splits == 1 && keys.begin < keys.end && keys.end - keys.begin <= kFewKeys &&
        !p_.block_mask) {
      RunTileOfFewKeys(tile, keys);
      return;
    }
    for (int64_t i = 0; i < tile.panels(); ++i) StartPanel(tile, i);
    if (!AccumulateKeys(tile, keys)) return;
    for (int64_t i = 0; i < tile.panels(); ++i) {
      Buffers::PanelState& state = buffers_.panels[i];
      if (!state.started) std::memset(state.o, 0, Bytes(p_.head_dim_v * panels_[i].cols()));
      if (plan_.splits == 1) {
        FinishPanel(tile, i);
      } else {
        StorePartial(tile_number, split, i);
      }
    }
    if (plan_.splits == 1) StorePadding(tile);
  }

  // Merges the splits of a tile, in order, and writes its output.
  void MergeTile(const ForwardTile& tile, int64_t tile_number) {
    for (int64_t i = 0; i < tile.panels(); ++i) {
      panels_[i].Init(p_, tile.batch, tile.kv_head, tile.row + i * kPanelRows, tile.panel_rows(i),
                      traffic_);
      Buffers::PanelState& state = buffers_.panels[i];
      const int64_t cols = panels_[i].cols();
      for (int64_t split = 0; split < plan_.splits; ++split) {
        const float* partial = Partial(tile_number, split, i);
        const int64_t floats = (p_.head_dim_v + 2) * cols;
        traffic_.Load(4 * floats);
        const float* m = partial + p_.head_dim_v * cols;
        if (split == 0) {
          std::memcpy(state.o, partial, Bytes(p_.head_dim_v * cols));
          std::memcpy(state.m, m, Bytes(cols));
          std::memcpy(state.l, m + cols, Bytes(cols));
        } else {
          MergeColumns(p_.head_dim_v, cols, partial, m, m + cols, state.o, state.m, state.l);
        }
      }
      FinishPanel(tile, i);
    }
    StorePadding(tile);
  }

 private:
  static size_t Bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

  float* Partial(int64_t tile_number, int64_t split, int64_t panel) const {
    return workspace_ + (tile_number * plan_.splits + split) * plan_.PartialFloats(p_) +
           panel * (p_.head_dim_v + 2) * kPanelRows;
  }

  // The panel's rows of q into buffers_.rows.
  void LoadQueries(const ForwardTile& tile, int64_t i) {
    Panel& panel = panels_[i];
    panel.Init(p_, tile.batch, tile.kv_head, tile.row + i * kPanelRows, tile.panel_rows(i),
               traffic_);
    const Sequence& s = p_.sequences[tile.batch];
    for (int64_t c = 0; c < panel.count(); ++c) {
      const int64_t at = tile.batch * p_.q.batch + (s.q_token + panel.query(c)) * p_.q.token +
                         panel.head(c) * p_.q.head;
      LoadRow(traffic_, ElementAt(in_.q, p_.dtype, at - in_.q_first), p_.dtype, p_.head_dim,
              buffers_.rows + c * d_);
    }
  }

  // q transposed and scaled; an empty softmax.
  void StartPanel(const ForwardTile& tile, int64_t i) {
    LoadQueries(tile, i);
    const Panel& panel = panels_[i];
    Buffers::PanelState& state = buffers_.panels[i];
    const int64_t cols = panel.cols();
    std::memset(buffers_.rows + panel.count() * d_, 0, Bytes((cols - panel.count()) * d_));
    TransposeTile(buffers_.rows, d_, cols, p_.head_dim, state.q, cols);
    ScaleRow(QueryFactor(p_), p_.head_dim * cols, state.q);
    std::fill_n(state.m, cols, -kInfinity);
    std::fill_n(state.l, cols, 0.0f);
    state.started = false;
  }

  // A whole tile whose rows see at most kFewKeys keys: the same steps without transposing q and the
  // output. The softmax is complete before p·v, so its scale goes into p.
  void RunTileOfFewKeys(const ForwardTile& tile, const KeyRange& keys) {
    LoadKeys(tile, keys);
    const int64_t n = keys.end - keys.begin;
    for (int64_t j = 0; j < n; ++j) {
      ScaleRow(QueryFactor(p_), p_.head_dim, buffers_.k + j * d_);
    }
    float* s = buffers_.s;
    float* const o = buffers_.panels[0].o;  // [count, dv_], as large as its transposed form
    for (int64_t i = 0; i < tile.panels(); ++i) {
      LoadQueries(tile, i);
      const Panel& panel = panels_[i];
      Buffers::PanelState& state = buffers_.panels[i];
      const int64_t cols = panel.cols(), count = panel.count();
      const KeyRange seen = {std::max(keys.begin, panel.keys().begin),
                             std::min(keys.end, panel.keys().end)};
      const int64_t seen_keys = std::max<int64_t>(0, seen.end - seen.begin);
      const int64_t first = seen_keys == 0 ? 0 : seen.begin - keys.begin;
      for (int64_t j = 0; j < seen_keys; ++j) {
        const float* k_row = buffers_.k + (first + j) * d_;
        for (int64_t c = 0; c < count; ++c) {
          s[j * cols + c] = DotRow(buffers_.rows + c * d_, k_row, p_.head_dim);
        }
        std::fill(s + j * cols + count, s + (j + 1) * cols, 0.0f);
      }
      std::fill_n(state.m, cols, -kInfinity);
      std::fill_n(state.l, cols, 0.0f);
      if (seen_keys > 0) {
        panel.AddScoreTerms(seen.begin, seen_keys, s, nullptr, buffers_.rows, buffers_.aux,
                            traffic_);
        SoftmaxTile(seen_keys, cols, s, state.m, state.l, buffers_.alpha);
      }
      if (seen_keys > 0 && p_.dropout) {
        panel.Dropout(seen.begin, seen_keys, buffers_.aux);
        MultiplyTile(seen_keys, cols, buffers_.aux, s);
      }
      FinishSoftmax(i);
      for (int64_t j = 0; j < seen_keys; ++j) MultiplyTile(1, cols, buffers_.scale, s + j * cols);
      Gemm(count, p_.head_dim_v, seen_keys, {s, 1, cols}, buffers_.v + first * dv_, dv_, o, dv_,
           GemmOutput::kStore);
      for (int64_t c = 0; c < count; ++c) StoreOut(tile, i, c, o + c * dv_);
    }
    StorePadding(tile);
  }

  // False: stopped.
  bool AccumulateKeys(const ForwardTile& tile, const KeyRange& keys) {
    const int64_t step = KeyTileOf(p_);
    for (int64_t base = keys.begin / step * step; base < keys.end; base += step) {
      if (stop_.ShouldStop()) return false;
      const KeyRange range = {std::max(base, keys.begin), std::min(base + step, keys.end)};
      bool shown = false;
      for (int64_t i = 0; i < tile.panels(); ++i) {
        buffers_.panels[i].shown = panels_[i].LoadBlockMask(range.begin, traffic_);
        shown |= buffers_.panels[i].shown;
      }
      if (!shown) continue;
      LoadKeys(tile, range);
      for (int64_t i = 0; i < tile.panels(); ++i) {
        const KeyRange seen = {std::max(range.begin, panels_[i].keys().begin),
                               std::min(range.end, panels_[i].keys().end)};
        if (buffers_.panels[i].shown && seen.begin < seen.end) {
          AccumulatePanel(i, seen, seen.begin - range.begin);
        }
      }
    }
    return true;
  }

  void LoadKeys(const ForwardTile& tile, const KeyRange& range) {
    const Sequence& s = p_.sequences[tile.batch];
    for (int64_t j = range.begin; j < range.end; ++j) {
      const int64_t k_at = tile.batch * p_.k.batch + (s.k_token + j) * p_.k.token +
                           tile.kv_head * p_.k.head - in_.k_first;
      const int64_t v_at = tile.batch * p_.v.batch + (s.k_token + j) * p_.v.token +
                           tile.kv_head * p_.v.head - in_.v_first;
      const int64_t row = j - range.begin;
      // The same rows of the next tile, which the processor does not foresee: heads lie between.
      if (j + kKeyTile < s.len_k) {
        PrefetchRow(ElementAt(in_.k, p_.dtype, k_at + kKeyTile * p_.k.token),
                    p_.head_dim * SizeOf(p_.dtype));
        PrefetchRow(ElementAt(in_.v, p_.dtype, v_at + kKeyTile * p_.v.token),
                    p_.head_dim_v * SizeOf(p_.dtype));
      }
      LoadRow(traffic_, ElementAt(in_.k, p_.dtype, k_at), p_.dtype, p_.head_dim,
              buffers_.k + row * d_);
      LoadRow(traffic_, ElementAt(in_.v, p_.dtype, v_at), p_.dtype, p_.head_dim_v,
              buffers_.v + row * dv_);
    }
  }

  // Scores, softmax step and output for keys [seen.begin, seen.end), which are rows first_row and
  // on of the key tile.
  void AccumulatePanel(int64_t i, const KeyRange& seen, int64_t first_row) {
    const Panel& panel = panels_[i];
    Buffers::PanelState& state = buffers_.panels[i];
    const int64_t keys = seen.end - seen.begin, cols = panel.cols();
    float* s = buffers_.s;
    Gemm(keys, cols, p_.head_dim, {buffers_.k + first_row * d_, d_, 1}, state.q, cols, s, cols,
         GemmOutput::kStore);
    panel.AddScoreTerms(seen.begin, keys, s, nullptr, buffers_.rows, buffers_.aux, traffic_);
    SoftmaxTile(keys, cols, s, state.m, state.l, buffers_.alpha);
    if (p_.dropout) {
      panel.Dropout(seen.begin, keys, buffers_.aux);
      MultiplyTile(keys, cols, buffers_.aux, s);
    }
    Gemm(p_.head_dim_v, cols, keys, {buffers_.v + first_row * dv_, 1, dv_}, s, cols, state.o, cols,
         state.started ? GemmOutput::kScaleAdd : GemmOutput::kStore, buffers_.alpha);
    state.started = true;
  }

  void StorePartial(int64_t tile_number, int64_t split, int64_t i) {
    const Buffers::PanelState& state = buffers_.panels[i];
    const int64_t cols = panels_[i].cols();
    float* partial = Partial(tile_number, split, i);
    std::memcpy(partial, state.o, Bytes(p_.head_dim_v * cols));
    std::memcpy(partial + p_.head_dim_v * cols, state.m, Bytes(cols));
    std::memcpy(partial + (p_.head_dim_v + 1) * cols, state.l, Bytes(cols));
    traffic_.Store(4 * (p_.head_dim_v + 2) * cols);
  }

  int64_t OutAt(const ForwardTile& tile, int64_t i, int64_t head) const {
    const int64_t token = p_.layout == Layout::kBshd ? tile.batch * p_.seqlen_q + i
                                                     : p_.sequences[tile.batch].q_token + i;
    return (token * p_.num_heads + head) * p_.head_dim_v;
  }

  // buffers_.scale and buffers_.lse of panel i.
  void FinishSoftmax(int64_t i) {
    const Panel& panel = panels_[i];
    const Buffers::PanelState& state = buffers_.panels[i];
    const int64_t cols = panel.cols();
    if (p_.has_sinks) {
      for (int64_t c = 0; c < cols; ++c) {
        buffers_.sink[c] = c < panel.count() ? LoadValue(traffic_, p_.sinks + panel.head(c)) : 0.0f;
      }
    }
    FinishColumns(cols, state.m, state.l, p_.has_sinks ? buffers_.sink : nullptr, buffers_.scale,
                  buffers_.lse);
  }

  // A finished row of out, and its lse.
  void StoreOut(const ForwardTile& tile, int64_t i, int64_t c, const float* row) {
    const int64_t query = panels_[i].query(c), head = panels_[i].head(c);
    StoreRow(traffic_, row, p_.head_dim_v, p_.out_dtype,
             ElementAt(tensors_.out, p_.out_dtype, OutAt(tile, query, head)));
    StoreValue(traffic_, buffers_.lse[c], tensors_.lse + p_.LseOffset(tile.batch, head) + query);
  }

  void FinishPanel(const ForwardTile& tile, int64_t i) {
    FinishSoftmax(i);
    const int64_t cols = panels_[i].cols();
    TransposeTile(buffers_.panels[i].o, cols, p_.head_dim_v, cols, buffers_.rows, dv_);
    for (int64_t c = 0; c < panels_[i].count(); ++c) {
      float* row = buffers_.rows + c * dv_;
      ScaleRow(buffers_.scale[c], p_.head_dim_v, row);
      StoreOut(tile, i, c, row);
    }
  }

  // Rows beyond Lq: out 0, lse −inf.
  void StorePadding(const ForwardTile& tile) {
    for (int64_t row = tile.row + tile.valid; row < tile.row + tile.rows; ++row) {
      const int64_t i = row / p_.group(), head = tile.kv_head * p_.group() + row % p_.group();
      StoreZeros(traffic_, p_.head_dim_v, p_.out_dtype,
                 ElementAt(tensors_.out, p_.out_dtype, OutAt(tile, i, head)));
      StoreValue(traffic_, -kInfinity, tensors_.lse + p_.LseOffset(tile.batch, head) + i);
    }
  }

  const AttentionProblem& p_;
  const ForwardTensors& tensors_;
  InputView in_;
  const ForwardPlan& plan_;
  float* const workspace_;
  StopFlag& stop_;
  TrafficCount traffic_;
  const int64_t d_, dv_;  // padded row widths of the tiles of k and v
  Buffers buffers_;
  Panel panels_[kMaxTilePanels];
};

int64_t WindowFloats(const AttentionProblem& p, const InputWindows& windows) {
  const int64_t elements = windows.sequences * (p.q.batch + p.k.batch + p.v.batch);
  return CeilDiv(elements * SizeOf(p.dtype) + 3 * kWindowAlignment, sizeof(float));
}

// Window by window: all tiles of a window's sequences on the worker that read them.
void RunWindows(const AttentionProblem& p, const ForwardTensors& tensors, const ForwardPlan& plan,
                const InputWindows& windows, const RunContext& context, StopFlag& stop,
                ThreadPool* pool) {
  using Clock = std::chrono::steady_clock;
  const int64_t window_floats = WindowFloats(p, windows);
  const int64_t sequence_tiles = plan.tiles_per_head * p.num_kv_heads;
  std::atomic<int64_t> reading{0}, working{0};
  const auto begin = Clock::now();
  pool->ParallelFor(windows.count, [&](int64_t window, int) {
    if (stop.ShouldStop()) return;
    const auto start = Clock::now();
    ForwardWorker worker(p, tensors, plan, context, stop, window_floats);
    const int64_t first = window * windows.sequences;
    const int64_t last = std::min(first + windows.sequences, p.batch);
    worker.ReadWindow(*context.reader, windows, first, last);
    const auto read = Clock::now();
    for (int64_t number = first * sequence_tiles; number < last * sequence_tiles; ++number) {
      if (stop.ShouldStop()) return;
      worker.RunTile(plan.Tile(p, number), number, /*split=*/0);
    }
    reading.fetch_add((read - start).count(), std::memory_order_relaxed);
    working.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
  });
  if (context.reading_ns != nullptr && working > 0) {
    const std::chrono::duration<double, std::nano> wall = Clock::now() - begin;
    *context.reading_ns = static_cast<uint64_t>(wall.count() * static_cast<double>(reading) /
                                                static_cast<double>(working));
  }
}

}  // namespace

absl::Status RunFlashForward(const AttentionProblem& p, const ForwardTensors& tensors,
                             const RunContext& context, ThreadPool* pool) {
  const ForwardPlan plan(p);
  if (plan.total_tiles == 0) return absl::OkStatus();
  StopFlag stop(context.cancel);
  if (context.reader != nullptr) {
    const InputWindows windows(p, plan);
    if (windows.count == 0) return absl::InternalError("flash_cpu was given a reader to no use");
    RunWindows(p, tensors, plan, windows, context, stop, pool);
    return stop.status();
  }
  const int64_t items = plan.total_tiles * plan.splits;
  pool->ParallelFor(items, [&](int64_t item, int) {
    if (stop.ShouldStop()) return;
    ForwardWorker worker(p, tensors, plan, context, stop);
    const int64_t number = item / plan.splits;
    worker.RunTile(plan.Tile(p, number), number, item % plan.splits);
  });
  if (plan.splits > 1) {
    pool->ParallelFor(plan.total_tiles, [&](int64_t number, int) {
      if (stop.ShouldStop()) return;
      ForwardWorker(p, tensors, plan, context, stop).MergeTile(plan.Tile(p, number), number);
    });
  }
  return stop.status();
}

}  // namespace attn
