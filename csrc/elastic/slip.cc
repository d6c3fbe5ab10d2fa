#include "elastic/slip.h"

#include <iomanip>

#include "base/error.h"
#include "net/checksum.h"

namespace ringcomm {
namespace {

constexpr const char* kMagic = "ringcomm-slip-3";

// Visits the fields of a slip, in the order of its text.
template <typename AnySlip>
void fields(AnySlip& slip, auto&& visit) {
  const auto decision = [&](auto& it) { visit(it.members), visit(it.step), visit(it.extra); };
  visit(slip.epoch), visit(slip.state), visit(slip.voted), visit(slip.decided), visit(slip.gone);
  visit(slip.ended), visit(slip.promised), visit(slip.ballot), visit(slip.proposes),
      decision(slip.proposal);
  visit(slip.accepted), decision(slip.value), decision(slip.made);
}

std::string word_of(const auto& field) { return str(field); }
std::string word_of(const std::string& field) { return str(std::quoted(field)); }
std::string word_of(Slip::State state) { return str(static_cast<int>(state)); }

void read(std::istream& in, auto& field) { in >> field; }
void read(std::istream& in, std::string& field) { in >> std::quoted(field); }
void read(std::istream& in, Slip::State& state) {
  int value = -1;
  in >> value;
  if (value < 0 || value > static_cast<int>(Slip::State::kLeft)) in.setstate(std::ios::failbit);
  state = static_cast<Slip::State>(value);
}

}  // namespace

std::vector<std::byte> to_bytes(const Slip& slip) {
  std::string text = kMagic;
  fields(slip, [&](const auto& field) { text += ' ' + word_of(field); });
  const uint32_t sum = checksum(std::as_bytes(std::span(text)).data(), text.size());
  text.append(reinterpret_cast<const char*>(&sum), sizeof sum);
  RINGCOMM_CHECK(text.size() <= kSlipBytes, "a slip of ", text.size(), " bytes: it has room for ",
                 kSlipBytes);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::optional<Slip> slip_from(std::span<const std::byte> bytes) {
  uint32_t sum = 0;
  if (bytes.size() < sizeof sum || bytes.size() > kSlipBytes) return std::nullopt;
  const auto body = bytes.first(bytes.size() - sizeof sum);
  std::memcpy(&sum, bytes.data() + body.size(), sizeof sum);
  if (sum != checksum(body.data(), body.size())) return std::nullopt;
  TextReader in(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
  std::string magic;
  Slip slip;
  in >> magic;
  fields(slip, [&](auto& field) { read(in, field); });
  return in && magic == kMagic ? std::optional(slip) : std::nullopt;
}

}  // namespace ringcomm
