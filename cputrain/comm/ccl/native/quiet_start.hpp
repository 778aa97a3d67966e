// Suppresses oneCCL's warning at its start about CCL_LOG_LEVEL, which is set to suppress its other warnings.
#pragma once

#include <iostream>
#include <sstream>
#include <string>

namespace cputrain {

// Buffers the output of a stream and writes it without that line at the end. oneCCL shares libstdc++'s streams.
class QuietStart {
 public:
  explicit QuietStart(std::ostream& stream) : stream_(stream), before_(stream.rdbuf(held_.rdbuf())) {}
  QuietStart(const QuietStart&) = delete;
  QuietStart& operator=(const QuietStart&) = delete;

  ~QuietStart() {
    stream_.rdbuf(before_);
    for (std::string line; std::getline(held_, line);) {
      if (line.find("value of CCL_LOG_LEVEL changed to be error") == std::string::npos) {
        stream_ << line << '\n';
      }
    }
    stream_.flush();
  }

 private:
  std::stringstream held_;
  std::ostream& stream_;
  std::streambuf* before_;
};

}  // namespace cputrain
