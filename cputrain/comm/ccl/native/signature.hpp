// HMAC-SHA256, as cputrain/comm/store.py signs the keys of a job's store: FIPS 180-4 and RFC 2104.
#pragma once

#include <string>

namespace cputrain {

// The signature of a text in lowercase hexadecimal digits.
std::string hmac_sha256(const std::string& key, const std::string& text);

}  // namespace cputrain
