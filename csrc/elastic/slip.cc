#include "elastic/slip.h"

#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "net/checksum.h"

namespace ringcomm {
namespace {

constexpr uint32_t kMagic = 0x736c6970;

class Writer {
 public:
  template <typename Number>
  void number(Number value) {
    static_assert(std::is_trivially_copyable_v<Number>);
    const auto* const from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
  }
  void text(const std::string& text) {
    number(static_cast<uint32_t>(text.size()));
    const auto* const from = reinterpret_cast<const std::byte*>(text.data());
    bytes.insert(bytes.end(), from, from + text.size());
  }
  // Most epochs have few members: only as many bytes as their ranks need.
  void members(const Members& members) {
    std::string bits;
    for (size_t rank = 0; rank < kMostMembers; ++rank) {
      if (!members.test(rank)) continue;
      bits.resize(rank / 8 + 1);
      bits.back() = static_cast<char>(static_cast<unsigned char>(bits.back()) | 1u << rank % 8);
    }
    text(bits);
  }
  void decision(const Decision& decision) {
    members(decision.members);
    number(decision.step);
    text(decision.extra);
  }
  std::vector<std::byte> bytes;
};

// Reads what may be anything.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename Number>
  Number number() {
    Number value{};
    if (const auto from = take(sizeof value); !from.empty()) {
      std::memcpy(&value, from.data(), sizeof value);
    }
    return value;
  }
  std::string text() {
    const auto from = take(number<uint32_t>());
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  Members members() {
    const std::string bits = text();
    Members members;
    if (bits.size() > kMostMembers / 8) whole_ = false;
    for (size_t rank = 0; whole_ && rank < bits.size() * 8; ++rank) {
      members.set(rank, (static_cast<unsigned char>(bits[rank / 8]) >> rank % 8 & 1) != 0);
    }
    return members;
  }
  Decision decision() {
    Decision decision;
    decision.members = members();
    decision.step = number<uint64_t>();
    decision.extra = text();
    return decision;
  }
  bool whole() const { return whole_; }

 private:
  std::span<const std::byte> take(size_t count) {
    if (count > bytes_.size()) whole_ = false;
    if (!whole_) return {};
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  std::span<const std::byte> bytes_;
  bool whole_ = true;
};

}  // namespace

std::vector<std::byte> to_bytes(const Slip& slip) {
  Writer out;
  out.number(kMagic);
  out.number(slip.epoch);
  out.number(slip.state);
  out.number(slip.voted);
  out.number(slip.decided);
  out.members(slip.gone);
  out.number(slip.promised);
  out.number(slip.ballot);
  out.number(slip.proposes);
  out.decision(slip.proposal);
  out.number(slip.accepted);
  out.decision(slip.value);
  out.decision(slip.made);
  out.number(checksum(out.bytes.data(), out.bytes.size()));
  RINGCOMM_CHECK(out.bytes.size() <= kSlipBytes, "a slip of ", out.bytes.size(),
                 " bytes: it has room for ", kSlipBytes);
  return out.bytes;
}

std::optional<Slip> slip_from(std::span<const std::byte> bytes) {
  uint32_t sum = 0;
  if (bytes.size() < sizeof sum || bytes.size() > kSlipBytes) return std::nullopt;
  const auto body = bytes.first(bytes.size() - sizeof sum);
  std::memcpy(&sum, bytes.data() + body.size(), sizeof sum);
  if (sum != checksum(body.data(), body.size())) return std::nullopt;
  Reader in(body);
  if (in.number<uint32_t>() != kMagic) return std::nullopt;
  Slip slip;
  slip.epoch = in.number<uint32_t>();
  slip.state = in.number<Slip::State>();
  slip.voted = in.number<bool>();
  slip.decided = in.number<uint64_t>();
  slip.gone = in.members();
  slip.promised = in.number<uint64_t>();
  slip.ballot = in.number<uint64_t>();
  slip.proposes = in.number<bool>();
  slip.proposal = in.decision();
  slip.accepted = in.number<uint64_t>();
  slip.value = in.decision();
  slip.made = in.decision();
  if (!in.whole() || slip.state > Slip::State::kLeft) return std::nullopt;
  return slip;
}

}  // namespace ringcomm
