// Decodes JPEGs into square crops of RGB bytes. libjpeg-turbo decodes only the rows and columns that are needed, which
// are then scaled (scale.hpp) and optionally mirrored.
//
// Plain C functions for ctypes. The functions of TurboJPEG 3 (libjpeg-turbo) come as a table of pointers: neither its
// headers nor the library are needed to compile this.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "jpeg_rows.hpp"
#include "scale.hpp"

extern "C" {

struct Region {
  int x, y, width, height;
};

// Functions of TurboJPEG 3, in the order of the table.
struct Turbo {
  void* (*init)(int);
  void (*destroy)(void*);
  int (*get)(void*, int);
  int (*header)(void*, const uint8_t*, size_t);
  int (*crop)(void*, Region);
  int (*decompress)(void*, const uint8_t*, size_t, uint8_t*, int, int);
};

// Square crop of an image: the region `box` is scaled to (width, height); the crop is the square of `side` pixels at
// (x, y) in the scaled region.
struct Crop {
  Region box;
  int width, height;
  int x, y, side;
  int flip;
};
}

namespace {

// TurboJPEG 3's numbers.
constexpr int kInitDecompress = 1, kPixelFormatRgb = 0;
constexpr int kSubsampling = 4, kWidth = 5, kHeight = 6, kPrecision = 7, kColorspace = 8;
constexpr int kRgb = 0, kYCbCr = 1, kGray = 2;
constexpr int kMcuWidth[] = {8, 16, 16, 8, 8, 32, 8};  // for 4:4:4, 4:2:2, 4:2:0, gray, 4:4:0, 4:1:1, 4:4:1

constexpr int kMargin = 2;  // columns left and right of the crop whose chroma is interpolated into its edge

}  // namespace

extern "C" {

// Decoder of one thread, and its buffers, which only grow.
struct Decoder {
  Turbo turbo;
  void* handle;
  std::vector<uint8_t> rows, part, between, made;
};

// Replaces TurboJPEG's handle, which after an error continues with the header that failed, and fails for other files.
static void renew(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  decoder->handle = decoder->turbo.init(kInitDecompress);
}

static void make_room(std::vector<uint8_t>& buffer, size_t bytes) {
  if (buffer.size() < bytes) {
    buffer.resize(bytes);
  }
}

Decoder* pixels_open(const Turbo* turbo) {
  return new Decoder{*turbo, turbo->init(kInitDecompress), {}, {}, {}, {}};
}

void pixels_close(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  delete decoder;
}

// Writes width and height of each JPEG that ends with an end marker; 0 for everything else, which Pillow decodes.
void pixels_sizes(int count, const uint8_t* const* data, const size_t* bytes, int* sizes) {
  for (int i = 0; i < count; i++, sizes += 2) {
    const uint8_t* of = data[i];
    const size_t end = bytes[i];
    const bool whole = end >= 4 && of[0] == 0xff && of[1] == 0xd8 && of[end - 2] == 0xff && of[end - 1] == 0xd9;
    const auto frame = whole ? jpeg_rows::frame_of(of, end) : jpeg_rows::Frame{};
    sizes[0] = frame.width;
    sizes[1] = frame.height;
  }
}

// Whether the image has 8 bits, and is gray or has three colors.
static bool is_supported(const Turbo& turbo, void* handle) {
  const int colors = turbo.get(handle, kColorspace), subsampling = turbo.get(handle, kSubsampling);
  return turbo.get(handle, kPrecision) == 8 && subsampling >= 0 &&
         subsampling < static_cast<int>(std::size(kMcuWidth)) &&
         (colors == kRgb || colors == kYCbCr || colors == kGray);
}

// Decodes a crop of one JPEG to (side, side, 3) bytes. False if it is damaged, or of a kind that Pillow has to decode.
static bool decode(Decoder* decoder, const uint8_t* data, size_t bytes, const Crop* crop, uint8_t* to) {
  const auto& turbo = decoder->turbo;
  const auto frame = jpeg_rows::frame_of(data, bytes);
  if (turbo.header(decoder->handle, data, bytes) != 0) {
    renew(decoder);
    return false;
  }
  if (!is_supported(turbo, decoder->handle) || turbo.get(decoder->handle, kWidth) != frame.width ||
      turbo.get(decoder->handle, kHeight) != frame.height) {
    return false;
  }
  const Region box = crop->box;
  const int side = crop->side;
  const auto columns = scale::weights_of(box.width, crop->width, crop->x, side);
  const auto rows = scale::weights_of(box.height, crop->height, crop->y, side);
  const int left = box.x + columns.begin(), right = box.x + columns.end();
  const int top = box.y + rows.begin(), height = rows.end() - rows.begin();
  const int mcu = kMcuWidth[turbo.get(decoder->handle, kSubsampling)];
  const int start = std::max(0, left - kMargin) / mcu * mcu;
  const int end = std::min(frame.width, right + kMargin);
  const size_t stride = 3 * static_cast<size_t>(end - start);
  make_room(decoder->part, stride * height + scale::kSlack);
  const auto rest = jpeg_rows::rows_of(data, bytes, frame, top, top + height, decoder->rows);
  if (turbo.crop(decoder->handle, {start, top - rest.above, end - start, height}) != 0 ||
      turbo.decompress(
          decoder->handle, rest.data, rest.bytes, decoder->part.data(), static_cast<int>(stride), kPixelFormatRgb) !=
          0) {
    renew(decoder);
    return false;
  }
  const auto vertical = scale::kAvx2 ? scale::scale_down_avx2 : scale::scale_down;
  const auto horizontal = scale::kAvx2 ? scale::scale_across_avx2 : scale::scale_across;
  const scale::Rows part{decoder->part.data() + 3 * (left - start), stride, rows.begin()};
  auto& between = decoder->between;
  // Pillow's order since release 13: vertically first if that leaves much less to scale horizontally.
  const int lower = box.height - crop->height, narrower = box.width - crop->width;
  if (lower > 0 && lower > 2 * narrower) {
    const size_t width = 3 * static_cast<size_t>(right - left), bytes = static_cast<size_t>(3) * side * side;
    make_room(between, width * side + scale::kSlack);
    make_room(decoder->made, bytes + scale::kSlack);
    vertical(part, static_cast<int>(width), rows, between.data());
    horizontal({between.data(), width, columns.begin()}, side, columns, crop->flip, decoder->made.data());
    std::memcpy(to, decoder->made.data(), bytes);
  } else {
    const size_t width = static_cast<size_t>(3) * side;
    make_room(between, width * height + scale::kSlack);
    horizontal({part.first, stride, columns.begin()}, height, columns, crop->flip, between.data());
    vertical({between.data(), width, rows.begin()}, 3 * side, rows, to);
  }
  return true;
}

// Decodes a crop of each JPEG to (count, side, side, 3) bytes; `done` is 0 for those that Pillow has to decode.
void pixels_decode(
    Decoder* decoder, int count, const uint8_t* const* data, const size_t* bytes, const Crop* crops, int side,
    uint8_t* to, uint8_t* done) {
  for (int i = 0; i < count; i++, to += static_cast<size_t>(3) * side * side) {
    done[i] = crops[i].side == side && decode(decoder, data[i], bytes[i], &crops[i], to);
  }
}

// Normalizes RGB bytes to (byte - shift) x scale of their color, in one pass.
#if defined(CPUTRAIN_AVX2)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void pixels_normalize(const uint8_t* from, float* to, size_t pixels, const float* shift, const float* scale) {
  constexpr size_t kBlock = 48;  // whole pixels and whole registers
  float shifts[kBlock], scales[kBlock];
  for (size_t i = 0; i < kBlock; i++) {
    shifts[i] = shift[i % 3];
    scales[i] = scale[i % 3];
  }
  const size_t bytes = 3 * pixels;
  size_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    for (size_t i = 0; i < kBlock; i++) {
      to[at + i] = (static_cast<float>(from[at + i]) - shifts[i]) * scales[i];
    }
  }
  for (; at < bytes; at++) {
    to[at] = (static_cast<float>(from[at]) - shifts[at % kBlock]) * scales[at % kBlock];
  }
}
}
