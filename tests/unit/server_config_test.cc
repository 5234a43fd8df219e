#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "kernels/api/text.h"
#include "server/config/config.h"
#include "server/config/log.h"

namespace attn::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Environment NoEnvironment() {
  return [](const std::string&) { return std::nullopt; };
}

Environment From(std::map<std::string, std::string> values) {
  return [values](const std::string& name) -> std::optional<std::string> {
    const auto it = values.find(name);
    if (it == values.end()) return std::nullopt;
    return it->second;
  };
}

// A file that is gone when the test ends.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(testing::TempDir() + "/attnd_config_" + std::to_string(getpid()) + ".toml") {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Config Parsed(const std::vector<std::string>& arguments, const Environment& environment) {
  absl::StatusOr<CommandLine> parsed = ParseCommandLine(arguments, environment);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? parsed->config : Config();
}

std::string ErrorOf(const std::vector<std::string>& arguments,
                    const Environment& environment = NoEnvironment()) {
  const absl::StatusOr<CommandLine> parsed = ParseCommandLine(arguments, environment);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return parsed.status().ToString();
}

TEST(ConfigTest, CudaDevicesAreAllNoneOrAList) {
  EXPECT_EQ(*ParseCudaDevices("all"), std::nullopt);
  EXPECT_THAT(**ParseCudaDevices("none"), ElementsAre());
  EXPECT_THAT(**ParseCudaDevices("2,0"), ElementsAre(2, 0));
  for (const char* text : {"", "x", "0,", "-1", "0;1", "1,1", "all,0"}) {
    EXPECT_THAT(ErrorOf({Cat("--cuda-devices=", text)}), HasSubstr("--cuda-devices")) << text;
  }
  const Config config = Parsed({"--device-memory-limit=8GiB"}, NoEnvironment());
  EXPECT_EQ(config.device_memory_limit_bytes, uint64_t{8} << 30);
}

TEST(ConfigTest, WorkersAreTwoWhereNothingIsSaid) {
  Config config = Parsed({}, NoEnvironment());
  EXPECT_EQ(config.executor_workers, 0);
  config.Resolve(uint64_t{1} << 30);
  EXPECT_EQ(config.executor_workers, 2);
}

TEST(ConfigTest, DefaultsAreLoopbackWithoutTls) {
  const Config config = Parsed({}, NoEnvironment());
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:50051"));
  EXPECT_EQ(config.metrics_listen, "127.0.0.1:9464");
  EXPECT_FALSE(config.tls());
  EXPECT_EQ(config.max_unary_bytes, uint64_t{256} << 20);
}

TEST(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const TemporaryFile file(
      "executor-workers = 3\nmax-inflight-requests = 30\nthreads = 5\n"
      "listen = [\"127.0.0.1:3\", \"127.0.0.1:33\"]\ndrain-timeout = \"3s\"\n");
  const Environment environment = From({{"ATTND_CONFIG", file.path()},
                                        {"ATTND_EXECUTOR_WORKERS", "2"},
                                        {"ATTND_MAX_INFLIGHT_REQUESTS", "20"},
                                        {"ATTND_CPU_FALLBACK", "true"},
                                        {"ATTND_LISTEN", "127.0.0.1:2,unix:/tmp/x"}});
  const Config config = Parsed({"--executor-workers", "1"}, environment);
  EXPECT_EQ(config.executor_workers, 1);        // flag
  EXPECT_EQ(config.max_inflight_requests, 20);  // environment
  EXPECT_EQ(config.threads, 5);                 // file
  EXPECT_EQ(config.drain_timeout, std::chrono::seconds(3));
  EXPECT_EQ(config.max_concurrent_streams, 256);  // default
  EXPECT_TRUE(config.cpu_fallback);
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:2", "unix:/tmp/x"));

  const Config flags = Parsed({"--listen=127.0.0.1:1"}, environment);
  EXPECT_THAT(flags.listen, ElementsAre("127.0.0.1:1"));  // a list is taken whole
  const Config only_file = Parsed({"--config", file.path()}, NoEnvironment());
  EXPECT_THAT(only_file.listen, ElementsAre("127.0.0.1:3", "127.0.0.1:33"));
}

TEST(ConfigTest, PrintedSettingsReadBackTheSame) {
  Config config = Parsed(
      {"--listen", "unix:/tmp/a b", "--log-format", "json", "--log-level", "warn", "--disable-path",
       "flash_cpu", "--max-unary-bytes", "64MiB", "--drain-timeout", "1500ms"},
      NoEnvironment());
  config.Resolve(uint64_t{8} << 30);
  const TemporaryFile file(config.ToFileText());
  const Config again = Parsed({"--config", file.path()}, NoEnvironment());
  EXPECT_EQ(again.ToFileText(), config.ToFileText());
  EXPECT_EQ(again.drain_timeout, std::chrono::milliseconds(1500));
}

TEST(ConfigTest, ResolveCapsByMemory) {
  Config config;
  config.Resolve(uint64_t{8} << 30);
  EXPECT_EQ(config.max_inflight_bytes, uint64_t{4} << 30);
  EXPECT_EQ(config.max_request_bytes, uint64_t{4} << 30);
  EXPECT_EQ(config.workspace_limit_bytes, uint64_t{2} << 30);
  EXPECT_GE(config.threads, 1);
  Config large;
  large.Resolve(uint64_t{512} << 30);
  EXPECT_EQ(large.max_request_bytes, uint64_t{16} << 30);
}

TEST(ConfigTest, PublicAddressNeedsTlsOrConsent) {
  EXPECT_THAT(ErrorOf({"--listen", "0.0.0.0:50051"}),
              AllOf(HasSubstr("0.0.0.0:50051"), HasSubstr("--allow-insecure-public")));
  EXPECT_THAT(ErrorOf({"--listen", "127.example.org:1"}), HasSubstr("reachable"));
  Parsed({"--listen", "0.0.0.0:50051", "--allow-insecure-public"}, NoEnvironment());
  Parsed({"--listen", "[::]:50051", "--tls-cert", "c", "--tls-key", "k"}, NoEnvironment());
}

TEST(ConfigTest, LoopbackAddresses) {
  for (const char* address : {"127.0.0.1:1", "127.8.9.10:1", "localhost:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
  for (const char* address :
       {"0.0.0.0:1", "10.0.0.1:1", "[::]:1", "host:1", "127.0.0.1.evil.org:1"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

TEST(ConfigTest, ErrorsNameFlagValueAndLimit) {
  EXPECT_THAT(ErrorOf({"--max-unary-bytes", "3GiB"}),
              AllOf(HasSubstr("--max-unary-bytes"), HasSubstr("3221225472"), HasSubstr("2 GiB")));
  EXPECT_THAT(ErrorOf({"--max-unary-bytes", "lots"}), HasSubstr("lots"));
  EXPECT_THAT(ErrorOf({"--executor-workers", "257"}), HasSubstr("--executor-workers is 257"));
  EXPECT_THAT(ErrorOf({"--device-lanes", "0"}), HasSubstr("--device-lanes is 0"));
  EXPECT_THAT(ErrorOf({"--listen", "127.0.0.1"}), HasSubstr("host:port"));
  EXPECT_THAT(ErrorOf({"--listen", "127.0.0.1:70000"}), HasSubstr("65535"));
  EXPECT_THAT(ErrorOf({"--tls-cert", "c"}), HasSubstr("--tls-key"));
  EXPECT_THAT(ErrorOf({"--tls-client-ca", "c"}), HasSubstr("--tls-cert"));
  EXPECT_THAT(ErrorOf({"--log-level", "chatty"}), HasSubstr("chatty"));
  EXPECT_THAT(ErrorOf({"--no-such-flag"}), HasSubstr("no-such-flag"));
  EXPECT_THAT(ErrorOf({"--drain-timeout", "soon"}), HasSubstr("soon"));
  EXPECT_THAT(ErrorOf({}, From({{"ATTND_THREADS", "many"}})), HasSubstr("many"));
  EXPECT_THAT(ErrorOf({"--config", "/does/not/exist"}), HasSubstr("/does/not/exist"));
  const TemporaryFile file("max-unary-byte = 5\n");
  EXPECT_THAT(ErrorOf({"--config", file.path()}), HasSubstr("max-unary-byte"));
}

TEST(ConfigTest, HelpAndVersionPrint) {
  const absl::StatusOr<CommandLine> help = ParseCommandLine({"--help"}, NoEnvironment());
  ASSERT_TRUE(help.ok());
  ASSERT_TRUE(help->print.has_value());
  EXPECT_THAT(*help->print, AllOf(HasSubstr("--max-unary-bytes"), HasSubstr("Precedence")));
  const absl::StatusOr<CommandLine> version = ParseCommandLine({"--version"}, NoEnvironment());
  ASSERT_TRUE(version.ok() && version->print.has_value());
  EXPECT_THAT(*version->print, HasSubstr("attnd " + Version()));
}

TEST(ConfigTest, SizesAndDurations) {
  EXPECT_EQ(*ParseBytes("4096"), 4096u);
  EXPECT_EQ(*ParseBytes("64KiB"), 65536u);
  EXPECT_EQ(*ParseBytes("1.5GiB"), uint64_t{3} << 29);
  EXPECT_EQ(*ParseBytes("9007199254740993"), 9007199254740993u);
  EXPECT_FALSE(ParseBytes("").ok());
  EXPECT_FALSE(ParseBytes("-1").ok());
  EXPECT_FALSE(ParseBytes("1XiB").ok());
  EXPECT_EQ(*ParseDuration("2m"), std::chrono::minutes(2));
  EXPECT_EQ(*ParseDuration("1.5"), std::chrono::milliseconds(1500));
  EXPECT_FALSE(ParseDuration("1h").ok());
}

TEST(LogTest, JsonIsEscaped) {
  EXPECT_EQ(log::Format(LogFormat::kJson, "T", LogLevel::kInfo, "a\"b",
                        {{"text", "x\n\x01\\"}, {"n", 5}, {"yes", true}, {"bad", "\xff"}}),
            "{\"time\":\"T\",\"level\":\"info\",\"event\":\"a\\\"b\",\"text\":\"x\\n\\u0001\\\\\","
            "\"n\":5,\"yes\":true,\"bad\":\"\\ufffd\"}");
}

TEST(LogTest, TextQuotesOnlyWhereNeeded) {
  EXPECT_EQ(log::Format(LogFormat::kText, "T", LogLevel::kWarn, "busy",
                        {{"path", "flash_cpu"}, {"why", "no room"}, {"rate", 0.5}}),
            "T warn busy path=flash_cpu why=\"no room\" rate=0.5");
}

}  // namespace
}  // namespace attn::server
