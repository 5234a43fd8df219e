// Times the CPU kernels.
//
//   attn_cpu_bench gemm    the matrix product on the tiles that flash_cpu uses, every SIMD target
//   attn_cpu_bench decode  few queries with many keys, and the shape of rpc-throughput
//   attn_cpu_bench tiny    one call of one head, S 16: the fixed cost of a call
//   attn_cpu_bench serve   runs calls named on standard input; cpu_vs_torch.py speaks to it
//
// serve, one line per request and per answer:
//   call PATH DTYPE BATCH S HEADS DIM CAUSAL FOLDER   reads q, k, v, dout from FOLDER/*.bin
//   ([batch,
//       S, heads, dim], raw), runs forward and backward once and writes out, lse, dq, dk, dv there.
//       Answer: "ok", or "error: …".
//   time forward|backward                             runs that call once. Answer: nanoseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/api/backend.h"
#include "kernels/api/spec.h"
#include "kernels/api/traffic.h"
#include "kernels/cpu/backends.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/thread_pool.h"

namespace attn {
namespace {

using Clock = std::chrono::steady_clock;

// 64-byte aligned bytes.
class Buffer {
 public:
  explicit Buffer(int64_t bytes = 0)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)), kAlign))) {
    std::memset(data_.get(), 0, static_cast<size_t>(bytes));
  }
  std::byte* data() { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() { return {data_.get(), static_cast<size_t>(bytes_)}; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlign); }
  };
  int64_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Median and minimum of `runs` timings, in nanoseconds.
struct Timing {
  double median, minimum;
};
Timing Time(int runs, const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    work();
    times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

struct Shape {
  DType dtype = DType::kFp32;
  int64_t batch = 1, seqlen_q = 1, seqlen_k = 1, heads = 1, kv_heads = 1, dim = 64;
  bool causal = false;
};

// One call with its tensors.
class Call {
 public:
  Call(const Shape& shape, const Backend* backend) : backend_(backend) {
    AttentionSpec spec;
    spec.num_heads = shape.heads;
    spec.num_kv_heads = shape.kv_heads;
    spec.q = {shape.dtype, {shape.batch, shape.seqlen_q, shape.heads, shape.dim}, {}};
    spec.k = {shape.dtype, {shape.batch, shape.seqlen_k, shape.kv_heads, shape.dim}, {}};
    spec.v = spec.k;
    spec.causal = shape.causal;
    spec.out = spec.q;
    spec.dout = spec.q;
    spec.lse = TensorSpec{DType::kFp32, {shape.batch, shape.heads, shape.seqlen_q}, {}};
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      absl::StatusOr<AttentionProblem> problem = Validate(spec, pass);
      if (!problem.ok()) {
        std::fprintf(stderr, "%s\n", problem.status().ToString().c_str());
        std::exit(1);
      }
      problems_[pass == Pass::kBackward] = *std::move(problem);
    }
    const int64_t width = SizeOf(shape.dtype);
    const int64_t q_bytes = spec.q.NumElements() * width, k_bytes = spec.k.NumElements() * width;
    for (Buffer* b : {&q, &out, &dout, &dq}) *b = Buffer(q_bytes);
    for (Buffer* b : {&k, &v, &dk, &dv}) *b = Buffer(k_bytes);
    lse = Buffer(spec.lse->NumElements() * 4);
    workspace_ = Buffer(std::max(backend->WorkspaceBytes(problems_[0], Pass::kForward),
                                 backend->WorkspaceBytes(problems_[1], Pass::kBackward)));
  }

  const AttentionProblem& problem(Pass pass) const { return problems_[pass == Pass::kBackward]; }

  void FillRandom() {
    uint64_t state = 1;
    for (Buffer* b : {&q, &k, &v, &dout}) {
      const DType dtype = problems_[0].dtype;
      for (int64_t i = 0; i < b->bytes() / SizeOf(dtype); ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const auto bits = static_cast<int32_t>(state >> 40) - (1 << 23);
        StoreElement(b->data(), dtype, i, static_cast<float>(bits) / (1 << 22));
      }
    }
  }

  absl::Status Run(Pass pass) {
    RunContext context;
    context.workspace = workspace_.span();
    if (pass == Pass::kForward) {
      return backend_->Forward(
          problems_[0],
          {q.data(), k.data(), v.data(), out.data(), reinterpret_cast<float*>(lse.data())},
          context);
    }
    BackwardTensors t;
    t.q = q.data();
    t.k = k.data();
    t.v = v.data();
    t.out = out.data();
    t.lse = reinterpret_cast<const float*>(lse.data());
    t.dout = dout.data();
    t.dq = dq.data();
    t.dk = dk.data();
    t.dv = dv.data();
    return backend_->Backward(problems_[1], t, context);
  }

  Buffer q, k, v, out, lse, dout, dq, dk, dv;

 private:
  const Backend* backend_;
  AttentionProblem problems_[2];
  Buffer workspace_;
};

int BenchGemm() {
  struct Row {
    const char* what;
    int64_t m, n, k;
    bool transposed_a;
  };
  const Row rows[] = {
      {"s = k q^T, dim 64", 128, 64, 64, false},     {"s = k q^T, dim 128", 128, 64, 128, false},
      {"o = v^T p, dim 64", 64, 64, 128, true},      {"o = v^T p, dim 128", 128, 64, 128, true},
      {"dv = p dout, dim 128", 128, 128, 64, false}, {"dq = ds k, dim 128", 64, 128, 128, true}};
  std::vector<float> a(1 << 16, 0.5f), b(1 << 16, 0.25f), c(1 << 16, 0.0f);
  std::printf("%-10s %-22s %10s\n", "target", "product", "GFLOP/s");
  for (SimdTarget target : SupportedSimdTargets()) {
    SetSimdTargetForTest(target);
    for (const Row& r : rows) {
      const GemmLeft left =
          r.transposed_a ? GemmLeft{a.data(), 1, r.m} : GemmLeft{a.data(), r.k, 1};
      constexpr int kRepeats = 50;
      const Timing t = Time(30, [&] {
        for (int i = 0; i < kRepeats; ++i) {
          Gemm(r.m, r.n, r.k, left, b.data(), r.n, c.data(), r.n, GemmOutput::kStore);
        }
      });
      std::printf("%-10s %-22s %10.1f\n", std::string(Name(target)).c_str(), r.what,
                  2.0 * r.m * r.n * r.k * kRepeats / t.median);
    }
  }
  return 0;
}

int BenchShapes(const Backend& backend, const std::vector<Shape>& shapes, int runs) {
  std::printf("%-6s %6s %4s %7s %3s %3s %4s %9s %12s %12s %9s %9s\n", "dtype", "batch", "Sq", "Sk",
              "H", "KV", "dim", "pass", "median us", "minimum us", "GFLOP/s", "GB/s");
  for (const Shape& s : shapes) {
    Call call(s, &backend);
    call.FillRandom();
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      const auto run = [&] {
        if (absl::Status status = call.Run(pass); !status.ok()) {
          std::fprintf(stderr, "%s\n", status.ToString().c_str());
          std::exit(1);
        }
      };
      run();
      const Timing t = Time(runs, run);
      const AttentionProblem& p = call.problem(pass);
      std::printf("%-6s %6ld %4ld %7ld %3ld %3ld %4ld %9s %12.1f %12.1f %9.1f %9.1f\n",
                  std::string(LowerName(s.dtype)).c_str(), s.batch, s.seqlen_q, s.seqlen_k, s.heads,
                  s.kv_heads, s.dim, std::string(Name(pass)).c_str(), t.median / 1e3,
                  t.minimum / 1e3, static_cast<double>(Flops(p, pass)) / t.median,
                  static_cast<double>(CompulsoryBytes(p, pass)) / t.median);
    }
  }
  return 0;
}

int BenchTiny(const Backend& backend) {
  const Shape shape{DType::kFp32, 1, 16, 16, 1, 1, 64, false};
  BenchShapes(backend, {shape}, 20000);
  Call call(shape, &backend);
  const AttentionProblem& p = call.problem(Pass::kForward);
  const Timing plan = Time(20000, [&] {
    const TileModel model = backend.Model(p, Pass::kForward);
    const int64_t bytes = backend.WorkspaceBytes(p, Pass::kForward);
    const std::string id = backend.KernelId(p, Pass::kForward);
    if (model.bytes() == 0 || bytes < 0 || id.empty()) std::abort();
  });
  std::printf("Model + WorkspaceBytes + KernelId: median %.0f ns\n", plan.median);
  return 0;
}

std::optional<DType> ParseDType(const std::string& name) {
  for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    if (name == LowerName(dtype)) return dtype;
  }
  return std::nullopt;
}

bool ReadFile(const std::string& path, Buffer& into) {
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(into.data()), into.bytes());
  return file.gcount() == into.bytes();
}

std::string HandleCall(std::istringstream& line, const Backend& flash, const Backend& standard,
                       std::unique_ptr<Call>& call) {
  std::string path, dtype_name, folder;
  Shape s;
  line >> path >> dtype_name >> s.batch >> s.seqlen_q >> s.heads >> s.dim >> s.causal >> folder;
  const std::optional<DType> dtype = ParseDType(dtype_name);
  if (!line || !dtype) return "error: cannot read the request";
  s.dtype = *dtype;
  s.seqlen_k = s.seqlen_q;
  s.kv_heads = s.heads;
  call = std::make_unique<Call>(s, path == "standard_cpu" ? &standard : &flash);
  const std::pair<const char*, Buffer*> inputs[] = {
      {"q", &call->q}, {"k", &call->k}, {"v", &call->v}, {"dout", &call->dout}};
  for (const auto& [name, buffer] : inputs) {
    if (!ReadFile(folder + "/" + name + ".bin", *buffer)) return std::string("error: ") + name;
  }
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (absl::Status status = call->Run(pass); !status.ok()) return "error: " + status.ToString();
  }
  const std::pair<const char*, Buffer*> outputs[] = {{"out", &call->out},
                                                     {"lse", &call->lse},
                                                     {"dq", &call->dq},
                                                     {"dk", &call->dk},
                                                     {"dv", &call->dv}};
  for (const auto& [name, buffer] : outputs) {
    std::ofstream file(folder + "/" + name + ".bin", std::ios::binary);
    file.write(reinterpret_cast<const char*>(buffer->data()), buffer->bytes());
    if (!file) return std::string("error: cannot write ") + name;
  }
  return "ok";
}

int Serve(const Backend& flash, const Backend& standard) {
  std::unique_ptr<Call> call;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string verb, pass;
    line >> verb;
    if (verb == "call") {
      std::cout << HandleCall(line, flash, standard, call) << std::endl;
    } else if (verb == "time" && call != nullptr && line >> pass) {
      const auto start = Clock::now();
      const absl::Status status = call->Run(pass == "backward" ? Pass::kBackward : Pass::kForward);
      const auto end = Clock::now();
      if (status.ok()) {
        std::cout << std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count()
                  << std::endl;
      } else {
        std::cout << "error: " << status << std::endl;
      }
    } else {
      std::cout << "error: unknown request" << std::endl;
    }
  }
  return 0;
}

int Main(const std::string& mode, int threads) {
  ThreadPool pool(threads);
  const std::unique_ptr<Backend> flash = MakeFlashCpuBackend(&pool);
  const std::unique_ptr<Backend> standard = MakeStandardCpuBackend(&pool);
  if (mode == "gemm") return BenchGemm();
  if (mode == "tiny") return BenchTiny(*flash);
  if (mode == "decode") {
    return BenchShapes(*flash,
                       {{DType::kBf16, 4096, 1, 1, 64, 1, 128, false},
                        {DType::kFp32, 1, 1, 16384, 32, 8, 128, false},
                        {DType::kBf16, 1, 1, 16384, 32, 8, 128, false},
                        {DType::kFp32, 1, 1, 16384, 8, 8, 128, false}},
                       7);
  }
  if (mode == "serve") return Serve(*flash, *standard);
  std::fprintf(stderr, "usage: attn_cpu_bench gemm|decode|tiny|serve [threads]\n");
  return 2;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  return attn::Main(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 0);
}
