#include "elastic/slip.h"

#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "net/checksum.h"

namespace ringcomm {
namespace {

constexpr uint32_t kMagic = 0x736c6970;

// What is in a slip, in this order: each(field) for all.
template <typename Each, typename AnySlip>
void fields(Each& each, AnySlip& slip) {
  const auto decision = [&](auto& it) { each(it.members), each(it.step), each(it.extra); };
  each(slip.epoch), each(slip.state), each(slip.voted), each(slip.decided), each(slip.gone);
  each(slip.promised), each(slip.ballot), each(slip.proposes), decision(slip.proposal);
  each(slip.accepted), decision(slip.value), decision(slip.made);
}

struct Writer {
  template <typename Number>
  void operator()(const Number& value) {
    static_assert(std::is_trivially_copyable_v<Number>);
    const auto* const from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    const auto* const from = reinterpret_cast<const std::byte*>(text.data());
    bytes.insert(bytes.end(), from, from + text.size());
  }
  std::vector<std::byte> bytes;
};

// Reads what may be anything.
struct Reader {
  template <typename Number>
  void operator()(Number& value) {
    static_assert(std::is_trivially_copyable_v<Number>);
    if (const auto from = take(sizeof value); !from.empty()) {
      std::memcpy(&value, from.data(), sizeof value);
    }
  }
  void operator()(std::string& text) {
    uint32_t size = 0;
    (*this)(size);
    const auto from = take(size);
    text.assign(reinterpret_cast<const char*>(from.data()), from.size());
  }
  std::span<const std::byte> take(size_t count) {
    if (count > bytes.size()) whole = false;
    if (!whole) return {};
    const auto taken = bytes.first(count);
    bytes = bytes.subspan(count);
    return taken;
  }
  std::span<const std::byte> bytes;
  bool whole = true;
};

}  // namespace

std::vector<std::byte> to_bytes(const Slip& slip) {
  Writer out;
  out(kMagic);
  fields(out, slip);
  out(checksum(out.bytes.data(), out.bytes.size()));
  RINGCOMM_CHECK(out.bytes.size() <= kSlipBytes, "a slip of ", out.bytes.size(),
                 " bytes: it has room for ", kSlipBytes);
  return out.bytes;
}

std::optional<Slip> slip_from(std::span<const std::byte> bytes) {
  uint32_t sum = 0, magic = 0;
  if (bytes.size() < sizeof sum || bytes.size() > kSlipBytes) return std::nullopt;
  const auto body = bytes.first(bytes.size() - sizeof sum);
  std::memcpy(&sum, bytes.data() + body.size(), sizeof sum);
  if (sum != checksum(body.data(), body.size())) return std::nullopt;
  Reader in{body};
  Slip slip;
  in(magic);
  if (magic != kMagic) return std::nullopt;
  fields(in, slip);
  if (!in.whole || slip.state > Slip::State::kLeft) return std::nullopt;
  return slip;
}

}  // namespace ringcomm
