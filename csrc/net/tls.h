// TLS 1.3 (RFC 8446) between processes, by OpenSSL; in the kernel, where it can (kTLS). Both ends
// prove that they have the job's secret, which is a pre-shared key with an exchange of fresh keys,
// or show certificates of one authority.
//
// The handshake of handshake.h runs inside, and its proofs hold for this very connection: see
// binding(). So nobody who has a certificate, and not the keys of this pair, can stand between.
#pragma once

#include <openssl/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <memory>
#include <span>

#include "base/config.h"
#include "base/fd.h"
#include "net/handshake.h"

namespace ringcomm {

// How a process encrypts, for all its connections.
class TlsSettings {
 public:
  // Records that one key may seal: 2^24.5 full ones, with AES-GCM (RFC 8446, section 5.5).
  static constexpr uint64_t kMostRecords = 1 << 24;

  // Throws UsageError where a certificate, a key or an authority cannot be used.
  explicit TlsSettings(const ProcessConfig& config, uint64_t most_records = kMostRecords);

  // Returns "off", "by-secret" or "by-certificate": the same on all ranks.
  const std::string& way() const { return way_; }
  bool on() const { return context_ != nullptr; }
  bool has_certificate() const { return certified_; }
  const Key& key() const { return key_; }
  uint64_t most_records() const { return most_records_; }
  SSL_CTX* context() const { return context_.get(); }

 private:
  void load(const ProcessConfig& config);

  std::string way_ = "off";
  bool certified_ = false;
  Key key_{};
  uint64_t most_records_;
  std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context_;
};

// One connection. Reading and writing make TLS's own handshake first.
class Tls {
 public:
  static constexpr size_t kMostHeld = 17 << 10;  // bytes of a record that has not come whole

  Tls(const TlsSettings& settings, const Fd& socket, bool accepting);

  // Work as read(2) and write(2) do: -1 and EAGAIN when the socket must be waited for. They take
  // one record at most. They throw FlowError; StrangerError where the other end could not prove who
  // it is. After EAGAIN, the next call of write() has to begin with the same bytes, from wherever.
  ssize_t read(std::span<std::byte> to);
  ssize_t write(std::span<const iovec> parts);
  bool has_more() const;       // bytes that came already, of which no event will tell
  bool waits_to_read() const;  // also to write: TLS's handshake goes on when something has come
  // Tells whether a key has sealed enough: the next connection has others. When one end closes it
  // for that, the other has seen as many records.
  bool is_worn() const { return std::max(sealed_, opened_) > settings_.most_records(); }
  // Returns a word of this connection, which its two ends alone know (RFC 8446, section 7.5).
  std::string binding() const;

 private:
  ssize_t outcome(int result);
  [[noreturn]] void refuse() const;

  const TlsSettings& settings_;
  std::unique_ptr<SSL, void (*)(SSL*)> ssl_;
  std::vector<std::byte> record_;
  size_t unsent_ = 0;                 // bytes of record_ that OpenSSL has not taken yet
  uint64_t sealed_ = 0, opened_ = 0;  // records
};

}  // namespace ringcomm
