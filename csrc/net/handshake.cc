#include "net/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace ringcomm {
namespace {

constexpr uint64_t kMagic = 0x31306d6d6f636372;  // "rccomm01"
constexpr int kMostFlows = 64;
constexpr uint64_t kNobody = ~uint64_t{0};  // as generation: nobody of that name is here

template <typename Bytes>
Bytes random_bytes() {
  Bytes bytes;
  const auto got = ::getrandom(bytes.data(), bytes.size(), 0);
  if (got != static_cast<ssize_t>(bytes.size())) throw SystemError("getrandom");
  return bytes;
}

std::string bytes_of(const void* data, size_t bytes) {
  return {static_cast<const char*>(data), bytes};
}

}  // namespace

struct Handshake::Hello {
  uint64_t magic = kMagic;
  ProcessId from{}, to{};
  uint32_t flow = 0, flows = 0;
  uint64_t generation = 0;  // of the last connection of this flow, as the initiator has it
  Key nonce{};
};
struct Handshake::Challenge {
  Key nonce{};
  uint64_t generation = 0;
  Key proof{};
};
struct Handshake::Proof {  // and Resume
  Cursor cursor;
  Key proof{};
};

Key random_key() { return random_bytes<Key>(); }
ProcessId random_id() { return random_bytes<ProcessId>(); }

Key hmac(const Key& key, const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) {
    const uint64_t size = part.size();
    all += bytes_of(&size, sizeof size) + part;
  }
  Key result;
  unsigned length = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(all.data()), all.size(), result.data(),
           &length) == nullptr) {
    throw std::runtime_error("HMAC-SHA256 failed: is OpenSSL installed as it should be?");
  }
  return result;
}

uint64_t channel_of(const std::vector<std::string>& parts) {
  return std::bit_cast<std::array<uint64_t, 4>>(hmac({}, parts))[0];
}

std::string to_hex(const uint8_t* data, size_t bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += {digits[data[i] >> 4], digits[data[i] & 15]};
  return text;
}

void from_hex(const std::string& text, uint8_t* data, size_t bytes) {
  RINGCOMM_CHECK(
      text.size() == 2 * bytes && text.find_first_not_of("0123456789abcdef") == std::string::npos,
      "not ", bytes, " bytes in hexadecimal: ", text.substr(0, 80));
  for (size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
}

Handshake::Handshake(const ProcessId& self, const ProcessId& peer, int flow, Party& party)
    : self_(self), party_(&party), initiator_(true), state_(State::kChallenge), flow_(flow) {
  Hello hello;
  hello.from = self;
  hello.to = peer;
  hello.flow = static_cast<uint32_t>(flow);
  hello.flows = static_cast<uint32_t>(party.flows());
  hello.generation = party.generation(flow);
  hello.nonce = random_key();
  said_ = bytes_of(&hello, sizeof hello);
  send(&hello, sizeof hello);
}

size_t Handshake::wanted() const {
  static_assert(sizeof(Hello) <= kMostBytes && sizeof(Proof) <= kMostBytes);
  // Entries are in the order of State.
  constexpr size_t bytes[] = {sizeof(Hello), 0, sizeof(Challenge), sizeof(Proof), sizeof(Proof), 0};
  return bytes[static_cast<size_t>(state_)];
}

void Handshake::send(const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  output_.insert(output_.end(), begin, begin + bytes);
}

// Both have said Hello and Challenge; `more` is what the message itself adds.
Key Handshake::proof(const char* label, const std::string& more) const {
  return hmac(party_->key(), {label, said_, binding_, more});
}

void Handshake::check_proof(const char* label, const std::string& more, const Key& theirs) const {
  if (CRYPTO_memcmp(proof(label, more).data(), theirs.data(), theirs.size()) != 0) {
    if (binding_.empty()) throw StrangerError();
    throw StrangerError(
        "its proof is not for this connection: it has another RINGCOMM_SECRET, or somebody stands "
        "between");
  }
}

void Handshake::send_cursor(const char* label) {
  Proof message;
  message.cursor = party_->fence(flow_);
  message.proof = proof(label, bytes_of(&message.cursor, sizeof message.cursor));
  send(&message, sizeof message);
}

void Handshake::take_cursor(const char* label, const std::byte* data) {
  Proof message;
  std::memcpy(&message, data, sizeof message);
  check_proof(label, bytes_of(&message.cursor, sizeof message.cursor), message.proof);
  theirs_ = message.cursor;
  state_ = State::kDone;
}

void Handshake::take(const std::byte* data) {
  switch (state_) {
    case State::kHello: {
      Hello hello;
      std::memcpy(&hello, data, sizeof hello);
      const auto most = static_cast<uint32_t>(most_flows(static_cast<int>(hello.flows)));
      if (hello.magic != kMagic || hello.flows > kMostFlows || hello.flow >= most) {
        throw FlowError("somebody who is not of this job connected");
      }
      if (hello.to != self_) {
        const Challenge nobody{hello.nonce, kNobody, {}};
        send(&nobody, sizeof nobody);
        throw FlowError("somebody looks for another process");
      }
      said_ = bytes_of(&hello, sizeof hello);
      flow_ = static_cast<int>(hello.flow);
      flows_ = static_cast<int>(hello.flows);
      generation_ = hello.generation;
      caller_ = hello.from;
      state_ = State::kParty;
      return;
    }
    case State::kChallenge: {
      Challenge challenge;
      std::memcpy(&challenge, data, sizeof challenge);
      // A Hello ends with its nonce.
      static_assert(offsetof(Hello, nonce) + sizeof challenge.nonce == sizeof(Hello));
      const std::string nonce = bytes_of(challenge.nonce.data(), challenge.nonce.size());
      if (challenge.generation == kNobody && said_.ends_with(nonce)) throw GoneError();
      generation_ = challenge.generation;
      said_ += bytes_of(&challenge, offsetof(Challenge, proof));
      check_proof("acceptor", "", challenge.proof);
      send_cursor("initiator");
      state_ = State::kResume;
      return;
    }
    case State::kProof:
      take_cursor("initiator", data);
      send_cursor("resume");
      return;
    case State::kResume:
      take_cursor("resume", data);
      return;
    default:
      throw FlowError("a handshake message too many");
  }
}

void Handshake::with(Party& party) {
  party_ = &party;
  Challenge challenge;
  challenge.nonce = random_key();
  challenge.generation = 1 + std::max(generation_, party.generation(flow_));
  generation_ = challenge.generation;
  said_ += bytes_of(&challenge, offsetof(Challenge, proof));
  challenge.proof = proof("acceptor", "");
  send(&challenge, sizeof challenge);
  state_ = State::kProof;
}

}  // namespace ringcomm
