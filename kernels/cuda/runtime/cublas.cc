#include "kernels/cuda/runtime/cublas.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attn::cuda {

// The C interface, as far as it is used. Source: cuBLAS 12 and 13, "cuBLAS API": cublasCreate,
// cublasSetStream, cublasSetWorkspace, cublasSetMathMode, cublasGemmStridedBatchedEx. Enums are int
// in the library's ABI.
struct Cublas::Functions {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*set_workspace)(void* handle, void* workspace, size_t bytes);
  int (*set_math_mode)(void* handle, int mode);
  int (*get_property)(int type, int* value);
  int (*gemm)(void* handle, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
              const void* alpha, const void* a, cudaDataType_t a_type, int64_t lda,
              long long stride_a, const void* b, cudaDataType_t b_type, int64_t ldb,
              long long stride_b, const void* beta, void* c, cudaDataType_t c_type, int64_t ldc,
              long long stride_c, int64_t count, int compute_type, int algorithm);
};

namespace {

// Values of the library's enums (cublas_api.h).
constexpr int kSuccess = 0, kAllocFailed = 3;
constexpr int kCompute32f = 68;          // CUBLAS_COMPUTE_32F
constexpr int kCompute32fPedantic = 69;  // CUBLAS_COMPUTE_32F_PEDANTIC: fp32 in every phase
constexpr int kDefaultAlgorithm = -1;
// CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: split sums are added in fp32, not in 16 bits.
constexpr int kMathMode = 16;

const char* StatusName(int status) {
  switch (status) {
    case 1:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case kAllocFailed:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case 7:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case 8:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case 11:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case 13:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case 15:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "unknown cuBLAS status";
  }
}

absl::Status Failed(const char* what, int status) {
  const std::string message = absl::StrCat(what, ": ", StatusName(status), " (", status, ")");
  return status == kAllocFailed ? absl::ResourceExhaustedError(message)
                                : absl::InternalError(message);
}

constexpr std::string_view kOff = "off";

// Folders to look in after the loader's own.
std::vector<std::string> ToolkitFolders() {
  std::vector<std::string> roots;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0') {
      roots.emplace_back(value);
    }
  }
  roots.emplace_back("/usr/local/cuda");
  std::vector<std::string> folders;
  for (const std::string& root : roots) {
    folders.push_back(absl::StrCat(root, "/lib64"));
    folders.push_back(absl::StrCat(root, "/lib"));
  }
  return folders;
}

void* OpenIn(const std::string& folder, const char* major, std::string* tried) {
  const std::string prefix = folder.empty() ? "" : absl::StrCat(folder, "/");
  // libcublas needs libcublasLt of the same folder, which the loader need not know.
  if (!folder.empty()) {
    dlopen(absl::StrCat(prefix, "libcublasLt.so.", major).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  const std::string path = absl::StrCat(prefix, "libcublas.so.", major);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) absl::StrAppend(tried, tried->empty() ? "" : ", ", path);
  return library;
}

void* Open(std::string* tried) {
  std::vector<std::string> folders = {""};
  for (std::string& folder : ToolkitFolders()) folders.push_back(std::move(folder));
  for (const std::string& folder : folders) {
    for (const char* major : {"13", "12"}) {
      if (void* library = OpenIn(folder, major, tried)) return library;
    }
  }
  return nullptr;
}

template <class Function>
bool Find(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && missing->empty()) *missing = name;
  return *function != nullptr;
}

}  // namespace

Cublas* Cublas::Load(std::string* why) {
  if (const char* value = std::getenv("ATTN_CUBLAS"); value != nullptr && value == kOff) {
    *why = "ATTN_CUBLAS=off";
    return nullptr;
  }
  std::string tried;
  void* library = Open(&tried);
  if (library == nullptr) {
    *why = absl::StrCat("cuBLAS 12 or 13 was not found (tried ", tried, ")");
    return nullptr;
  }
  auto* f = new Functions();
  std::string missing;
  Find(library, "cublasCreate_v2", &f->create, &missing);
  Find(library, "cublasDestroy_v2", &f->destroy, &missing);
  Find(library, "cublasSetStream_v2", &f->set_stream, &missing);
  Find(library, "cublasSetWorkspace_v2", &f->set_workspace, &missing);
  Find(library, "cublasSetMathMode", &f->set_math_mode, &missing);
  Find(library, "cublasGetProperty", &f->get_property, &missing);
  Find(library, "cublasGemmStridedBatchedEx_64", &f->gemm, &missing);
  if (!missing.empty()) {
    *why = absl::StrCat("cuBLAS has no ", missing);
    delete f;
    return nullptr;
  }
  auto* cublas = new Cublas();
  cublas->functions_ = f;
  int version[3];
  if (f->get_property(0, &version[0]) == kSuccess && f->get_property(1, &version[1]) == kSuccess &&
      f->get_property(2, &version[2]) == kSuccess) {
    cublas->version_ = absl::StrCat(version[0], ".", version[1], ".", version[2]);
  }
  return cublas;
}

const Cublas* Cublas::Get(std::string* why) {
  struct Found {
    std::string why;
    const Cublas* library = Load(&why);
  };
  static const Found* const kFound = new Found();  // never unloaded: handles outlive main
  if (why != nullptr) *why = kFound->why;
  return kFound->library;
}

absl::StatusOr<CublasHandle> Cublas::Handle(int device, cudaStream_t stream, void* workspace,
                                            int64_t workspace_bytes) const {
  void* handle = nullptr;
  {
    MutexLock lock(mutex_);
    std::vector<void*>& idle = idle_[device];
    if (!idle.empty()) {
      handle = idle.back();
      idle.pop_back();
    }
  }
  if (handle == nullptr) {
    if (const int status = functions_->create(&handle); status != kSuccess) {
      return Failed("cublasCreate", status);
    }
    if (const int status = functions_->set_math_mode(handle, kMathMode); status != kSuccess) {
      functions_->destroy(handle);
      return Failed("cublasSetMathMode", status);
    }
  }
  CublasHandle lease(this, device, handle);
  // In this order: setting the stream resets the workspace.
  if (const int status = functions_->set_stream(handle, stream); status != kSuccess) {
    return Failed("cublasSetStream", status);
  }
  const int status =
      functions_->set_workspace(handle, workspace, static_cast<size_t>(workspace_bytes));
  if (status != kSuccess) return Failed("cublasSetWorkspace", status);
  return lease;
}

void Cublas::Return(int device, void* handle) const {
  MutexLock lock(mutex_);
  idle_[device].push_back(handle);
}

CublasHandle::CublasHandle(CublasHandle&& other) noexcept
    : library_(other.library_),
      device_(other.device_),
      handle_(std::exchange(other.handle_, nullptr)) {}

CublasHandle::~CublasHandle() {
  if (handle_ != nullptr) library_->Return(device_, handle_);
}

absl::Status CublasHandle::Run(const BlasProduct& p) const {
  const int compute = p.type == CUDA_R_32F ? kCompute32fPedantic : kCompute32f;
  const int status = library_->functions_->gemm(
      handle_, p.transpose_a ? 1 : 0, p.transpose_b ? 1 : 0, p.m, p.n, p.k, &p.alpha, p.a, p.type,
      p.lda, p.stride_a, p.b, p.type, p.ldb, p.stride_b, &p.beta, p.c, p.c_type, p.ldc, p.stride_c,
      p.count, compute, kDefaultAlgorithm);
  if (status != kSuccess) return Failed("cublasGemmStridedBatchedEx", status);
  return absl::OkStatus();
}

}  // namespace attn::cuda
