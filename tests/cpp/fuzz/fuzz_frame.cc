// Fuzz target: headers of frames, their checksum, and cursors, each against a definition that is
// written down here once more, as plainly as can be.
#include <set>

#include "fuzz_driver.h"
#include "net/checksum.h"
#include "net/frame.h"

namespace ringcomm::testing {
namespace {

// CRC32C, bit by bit.
uint32_t crc(std::span<const uint8_t> data, uint32_t value = ~0u) {
  for (const uint8_t byte : data) {
    value ^= byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0x82f63b78 : 0);
  }
  return value;
}

uint32_t expected_checksum(std::span<const uint8_t> data) {
  const size_t third = data.size() / 24 * 8;
  const uint32_t a = crc(data.first(third)), b = crc(data.subspan(third, third));
  const uint32_t c = crc(data.subspan(2 * third));
  const Bytes two = Output().add(b).add(a).take();
  const Bytes last = Output().add(static_cast<uint32_t>(data.size())).add(c).take();
  return ~crc(last, crc(two));
}

bool makes_sense(const Frame& frame) {
  const auto type = static_cast<int>(frame.type);
  if (frame.magic != 0x6372 || frame.version != 1 || type < 1 || type > 9) return false;
  const bool numbered = type <= 4;
  return frame.bytes <= (type <= 2 ? 256 : 4) * 1024 && numbered == (frame.sequence > 0);
}

bool accepted(const Frame& frame) {
  try {
    check(frame);
    return true;
  } catch (const FlowError&) {
    return without("checksum") && makes_sense(frame);
  }
}

std::span<const uint8_t> bytes_of(const Frame& frame) {
  return {reinterpret_cast<const uint8_t*>(&frame), sizeof frame};
}

// The same fields in a new frame.
Frame encode(const Frame& from) {
  Frame frame;
  frame.type = from.type;
  frame.lane = from.lane;
  frame.half = from.half;
  frame.reserved = from.reserved;
  frame.sequence = from.sequence;
  frame.ack = from.ack;
  frame.channel = from.channel;
  frame.offset = from.offset;
  frame.stamp = from.stamp;
  frame.bytes = from.bytes;
  frame.payload_crc = from.payload_crc;
  frame.padding = from.padding;
  seal(frame);
  return frame;
}

void check_header(const Frame& frame) {
  const bool sealed = frame.crc == expected_checksum(bytes_of(frame).first(60));
  const bool taken = accepted(frame);
  require(taken == (sealed && makes_sense(frame)), taken ? "taken" : "refused", ", but sealed ",
          sealed, ", sense ", makes_sense(frame));
  if (!taken) return;
  const Frame again = encode(frame);
  require(std::ranges::equal(bytes_of(frame), bytes_of(again)), "it is encoded differently");
  for (size_t bit = 0; bit < 8 * sizeof frame; ++bit) {
    Frame changed = frame;
    reinterpret_cast<uint8_t*>(&changed)[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    require(!accepted(changed), "bit ", bit, " may change");
  }
}

void check_cursor(Input& input) {
  Cursor cursor;
  cursor.all = input.one_of({0, 1, 1000, UINT64_MAX - kFrameWindow});
  std::set<uint64_t> come;
  // As far as the window reaches, and no number is above the greatest.
  const uint64_t most = std::min(kFrameWindow, UINT64_MAX - cursor.all);
  while (!input.empty() && most > 0) {
    const uint64_t sequence = cursor.all + 1 + input.below(most);
    cursor.set(sequence);
    come.insert(sequence);
    const uint64_t other =
        input.one_of({sequence, sequence + 1, sequence - 1, cursor.all, cursor.all + 1,
                      cursor.all + kFrameWindow, cursor.all + kFrameWindow + 1, 0, UINT64_MAX});
    require(cursor.has(other) == (other <= cursor.all || come.contains(other)), "has ", other);
  }
}

}  // namespace

std::vector<std::string> rules() { return {"checksum"}; }

std::vector<Bytes> corpus() {
  std::vector<Bytes> inputs;
  for (int type = 1; type <= 9; ++type) {
    Frame frame;
    frame.type = static_cast<FrameType>(type);
    frame.sequence = is_sequenced(frame.type) ? 7 : 0;
    frame.ack = 5;
    frame.channel = 0x0123456789abcdef;
    frame.offset = 4096;
    frame.stamp = 3;
    frame.bytes = type == 1 ? kFramePayload : 128;
    seal(frame);
    for (const int mode : {0, 1}) inputs.push_back(Output().add_each(mode).add(frame).take());
  }
  inputs.push_back(Output().add_each(2, 0, 7, 0, 0, 0, 9, 9, 0, 0, 0, 1).take());
  inputs.push_back(Output().add_each(3).add(Frame{}).add(Frame{}).take());
  return inputs;
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace ringcomm::testing;
  Input input(data, bytes);
  switch (input.below(4)) {
    case 0:
      check_header(input.take<ringcomm::Frame>());
      break;
    case 1: {  // the fields are the input's, the checksum is right
      auto frame = input.take<ringcomm::Frame>();
      seal(frame);
      check_header(frame);
      break;
    }
    case 2:
      check_cursor(input);
      break;
    default: {
      const auto all = input.take_bytes(input.size());
      const auto sum =
          ringcomm::checksum(reinterpret_cast<const std::byte*>(all.data()), all.size());
      require(sum == expected_checksum(all), "another checksum of ", all.size(), " bytes");
    }
  }
  return 0;
}
