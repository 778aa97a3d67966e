#include "signature.hpp"

#include <array>
#include <bit>
#include <cstdint>

namespace cputrain {

namespace {

constexpr size_t kBlock = 64;
using State = std::array<uint32_t, 8>;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block(State& state, const unsigned char* block) {
  uint32_t words[64];
  for (int i = 0; i < 16; i++) {
    words[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
               uint32_t{block[4 * i + 3]};
  }
  for (int i = 16; i < 64; i++) {
    const auto a = words[i - 15], b = words[i - 2];
    const auto first = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
    const auto second = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
    words[i] = words[i - 16] + first + words[i - 7] + second;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; i++) {
    const auto one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] +
                     words[i];
    const auto two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; i++) {
    state[i] += added[i];
  }
}

std::string sha256(std::string text) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = 8 * text.size();
  text += '\x80';
  text.resize((text.size() + 8 + kBlock - 1) / kBlock * kBlock - 8, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    text += static_cast<char>(bits >> shift & 0xff);
  }
  for (size_t at = 0; at < text.size(); at += kBlock) {
    add_block(state, reinterpret_cast<const unsigned char*>(text.data()) + at);
  }
  std::string digest;
  for (const auto word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      digest += static_cast<char>(word >> shift & 0xff);
    }
  }
  return digest;
}

}  // namespace

std::string hmac_sha256(const std::string& key, const std::string& text) {
  auto padded = key.size() > kBlock ? sha256(key) : key;
  padded.resize(kBlock, '\0');
  auto inner = padded, outer = padded;
  for (size_t i = 0; i < kBlock; i++) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  std::string digits;
  for (const unsigned char byte : sha256(outer + sha256(inner + text))) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

}  // namespace cputrain
