// Parses a JPEG's header, and drops the rows of blocks that a crop does not need. If there are restart markers between
// the rows, the remaining rows form a JPEG of fewer rows with the same pixels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace jpeg_rows {

constexpr uint8_t kFrame = 0xc0, kSequential = 0xc1, kProgressive = 0xc2, kLastFrame = 0xcf;
constexpr uint8_t kTables = 0xc4, kReserved = 0xc8, kArithmetic = 0xcc;  // in the range of frames, but not frames
constexpr uint8_t kRestart = 0xd0, kLastRestart = 0xd7, kEnd = 0xd9, kScan = 0xda, kInterval = 0xdd;
constexpr int kMargin = 2;  // rows above and below the crop whose chroma is interpolated into its edge
// libjpeg-turbo takes its slow path if fewer bytes than these are left: the most that one of its steps could consume.
constexpr size_t kAhead = 10 * 64 * 8;
constexpr size_t kLarge = 64 << 10;  // in larger files the slow part is too small to be worth a copy

// Contents of a file's headers up to its first scan. All 0 if they are invalid.
struct Frame {
  int width = 0, height = 0;
  size_t height_at = 0;  // offset of the height, two bytes
  size_t data = 0;       // offset of the first scan's coded data
  int segment = 0;       // pixel rows from one restart marker to the next; 0 if rows cannot be dropped
};

inline int word(const uint8_t* at) {
  return at[0] << 8 | at[1];
}

inline Frame frame_of(const uint8_t* data, size_t bytes) {
  Frame found;
  bool sequential = false;
  int across = 0, row = 0, interval = 0, colors = 0;
  for (size_t at = 2; at + 4 <= bytes && data[at] == 0xff;) {
    const uint8_t marker = data[at + 1];
    if (marker == 0xff) {  // fill byte
      at++;
      continue;
    }
    const size_t length = word(data + at + 2);
    const uint8_t* body = data + at + 4;
    if (length < 3 || at + 2 + length > bytes) {
      return {};
    }
    if (marker >= kFrame && marker <= kLastFrame && marker != kTables && marker != kReserved && marker != kArithmetic) {
      if (marker > kProgressive || length < 8 || body[5] == 0 || length < 8 + 3u * body[5]) {
        return {};
      }
      sequential = marker <= kSequential;
      colors = body[5];
      int wide = 1, high = 1;
      for (int i = 0; i < colors && colors > 1; i++) {  // blocks of a single color are not interleaved
        wide = std::max(wide, body[7 + 3 * i] >> 4);
        high = std::max(high, body[7 + 3 * i] & 15);
      }
      found.height_at = at + 5;
      found.height = word(body + 1);
      found.width = word(body + 3);
      row = 8 * high;
      across = (found.width + 8 * wide - 1) / (8 * wide);
    } else if (marker == kInterval && length == 4) {
      interval = word(body);
    } else if (marker == kScan) {
      if (found.width == 0 || found.height == 0) {
        return {};
      }
      found.data = at + 2 + length;
      found.segment = sequential && body[0] == colors && interval % across == 0 ? interval / across * row : 0;
      return found;
    }
    at += 2 + length;
  }
  return {};
}

// Returns the restart marker that follows `count` others from `at` on, or the end if there are fewer.
inline const uint8_t* skip_restarts(const uint8_t* at, const uint8_t* end, int count) {
  while ((at = static_cast<const uint8_t*>(std::memchr(at, 0xff, end - at))) != nullptr && at + 1 < end) {
    if (at[1] >= kRestart && at[1] <= kLastRestart && count-- == 0) {
      return at;
    }
    at += at[1] == 0xff ? 1 : 2;
  }
  return end;
}

// A JPEG with some of the rows of a file.
struct JpegPart {
  const uint8_t* data;
  size_t bytes;
  int above;  // pixel rows dropped above
};

// Returns the whole file; small files are copied to `made` and padded with zeros.
inline JpegPart whole_of(const uint8_t* data, size_t bytes, std::vector<uint8_t>& made) {
  if (bytes > kLarge) {
    return {data, bytes, 0};
  }
  made.assign(data, data + bytes);
  made.resize(bytes + kAhead);
  return {made.data(), made.size(), 0};
}

// Returns the rows [top, bottom) and their margin, in `made` unless it is a whole large file.
inline JpegPart rows_of(
    const uint8_t* data, size_t bytes, const Frame& frame, int top, int bottom, std::vector<uint8_t>& made) {
  const int step = frame.segment;
  const int first = step > 0 ? std::max(0, top - kMargin) / step : 0;
  if (first == 0) {  // nothing to drop above, and the decoder itself stops below the crop
    return whole_of(data, bytes, made);
  }
  const int last = std::min((bottom + kMargin + step - 1) / step, (frame.height + step - 1) / step);
  const int height = std::min(last * step, frame.height) - first * step;
  made.assign(data, data + frame.data);
  made[frame.height_at] = static_cast<uint8_t>(height >> 8);
  made[frame.height_at + 1] = static_cast<uint8_t>(height);
  const uint8_t* end = data + bytes;
  const uint8_t* at = skip_restarts(data + frame.data, end, first - 1) + 2;
  for (int i = 0; i < last - first; i++) {
    const uint8_t* stop = at < end ? skip_restarts(at, end, 0) : end;
    const bool ends = stop == end;
    if (ends && (at >= end || (first + i + 1) * step < frame.height)) {  // a marker is missing
      return whole_of(data, bytes, made);
    }
    made.insert(made.end(), at, ends ? stop - 2 : stop);
    made.push_back(0xff);
    made.push_back(i + 1 < last - first ? kRestart + i % 8 : kEnd);
    at = stop + 2;
  }
  made.resize(made.size() + kAhead);
  return {made.data(), made.size(), first * step};
}

}  // namespace jpeg_rows
