// attn merge.
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/merge_results.h"
#include "client/cli/text.h"

namespace attn::cli {
namespace {

namespace v1 = client::v1;

absl::StatusOr<Partial> OpenPartial(const std::string& path) {
  absl::StatusOr<TensorMap> tensors = OpenTensors(path);
  if (!tensors.ok()) return tensors.status();
  Partial part;
  for (const auto& [name, target] : {std::pair("out", &part.out), std::pair("lse", &part.lse)}) {
    auto found = tensors->find(name);
    if (found == tensors->end()) {
      return absl::NotFoundError(Cat(path, ": has no tensor '", name,
                                     "'; a part is a .safetensors file with out and lse"));
    }
    *target = found->second;
  }
  return part;
}

// The merged out in another dtype.
absl::StatusOr<client::HostTensor> As(const client::HostTensor& tensor, v1::DType dtype) {
  const FileTensor file{"the merged result", FileDType::kF32, "F32",
                        tensor.shape,        tensor.owner,    tensor.bytes};
  return ToHostTensor(file, "out", dtype);
}

}  // namespace

int RunMerge(const Flags& flags, const Console& console) {
  std::optional<v1::DType> dtype = v1::DTYPE_FP32;
  if (!flags.problem.out_dtype.empty()) dtype = DTypeFromFlag(flags.problem.out_dtype);
  if (!dtype) {
    return ExplainLocal(absl::InvalidArgumentError(Cat("--out-dtype ", flags.problem.out_dtype,
                                                       ": must be fp32, fp16 or bf16")),
                        console);
  }
  absl::StatusOr<OutputTarget> target = OutputTarget::Create(flags.output.output, 2);
  if (!target.ok()) return ExplainLocal(target.status(), console);
  std::vector<Partial> parts;
  for (const std::string& path : flags.parts) {
    absl::StatusOr<Partial> part = OpenPartial(path);
    if (!part.ok()) return ExplainLocal(part.status(), console);
    if (part->out.dtype == FileDType::kF16 || part->out.dtype == FileDType::kBF16) {
      console.Note(Cat(path, ": out is ", part->out.dtype_name,
                       ", so the merge has its rounding; make parts with --out-dtype fp32"));
    }
    parts.push_back(*std::move(part));
  }
  absl::StatusOr<Merged> merged = MergeResults(parts);
  if (!merged.ok()) return ExplainLocal(merged.status(), console);
  absl::StatusOr<client::HostTensor> out = As(merged->out, *dtype);
  if (!out.ok()) return ExplainLocal(out.status(), console);
  const std::vector<NamedTensor> results = {{"out", *out}, {"lse", merged->lse}};
  absl::StatusOr<std::vector<std::string>> written = target->Write(results, {});
  if (!written.ok()) return ExplainLocal(written.status(), console);
  if (flags.output.json) {
    nlohmann::ordered_json document = {
        {"command", "merge"}, {"parts", flags.parts}, {"results", nlohmann::ordered_json::array()}};
    for (size_t i = 0; i < results.size(); ++i) {
      document["results"].push_back({{"name", results[i].name},
                                     {"dtype", LowerName(results[i].tensor.dtype)},
                                     {"shape", results[i].tensor.shape},
                                     {"file", (*written)[i]}});
    }
    console.out << document.dump(2) << "\n";
    return kExitOk;
  }
  const Style style = StyleOf(flags.output);
  Table table(2);
  for (size_t i = 0; i < results.size(); ++i) {
    table.Add({results[i].name, std::string(LowerName(results[i].tensor.dtype)),
               ShapeString(results[i].tensor.shape), Cat(style.Arrow(), " ", (*written)[i])});
  }
  console.out << style.Bold(Cat("merged ", parts.size(), " parts")) << "\n" << table.ToString();
  return kExitOk;
}

}  // namespace attn::cli
