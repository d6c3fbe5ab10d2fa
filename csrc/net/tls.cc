#include "net/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace ringcomm {
namespace {

constexpr size_t kRecord = 16 << 10;
constexpr unsigned char kAes128[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256: of the key's hash
constexpr char kSuites[] = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::string_view kIdentity = "ringcomm";
constexpr unsigned char kContext[] = {'r'};  // OpenSSL demands one, and that it is the same
constexpr int kControlRecord = 0x1000;       // OpenSSL's mark of what kTLS must not send as data

std::string reason_of(unsigned long error) {
  const char* reason = ERR_reason_error_string(error);
  return reason == nullptr ? "no reason given" : reason;
}

// ---- sockets

// As OpenSSL's own, but a peer that has gone is an error and no SIGPIPE.
int send_bytes(BIO* bio, const char* data, int bytes) {
  if (BIO_test_flags(bio, kControlRecord) != 0) {
    return BIO_meth_get_write(BIO_s_socket())(bio, data, bytes);
  }
  BIO_clear_retry_flags(bio);
  const auto size = static_cast<size_t>(bytes);
  const auto sent = ::send(static_cast<int>(BIO_get_fd(bio, nullptr)), data, size, MSG_NOSIGNAL);
  if (sent < 0 && BIO_sock_should_retry(-1) != 0) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

BIO* bio_of(const Fd& socket) {
  static BIO_METHOD* const method = [] {
    const BIO_METHOD* own = BIO_s_socket();
    BIO_METHOD* made = BIO_meth_new(BIO_TYPE_SOCKET, "socket");
    BIO_meth_set_write(made, send_bytes);
    BIO_meth_set_read(made, BIO_meth_get_read(own));
    BIO_meth_set_ctrl(made, BIO_meth_get_ctrl(own));
    BIO_meth_set_create(made, BIO_meth_get_create(own));
    BIO_meth_set_destroy(made, BIO_meth_get_destroy(own));
    return made;
  }();
  BIO* bio = BIO_new(method);
  BIO_set_fd(bio, socket.get(), BIO_NOCLOSE);
  return bio;
}

// ---- the secret

SSL_SESSION* session_of(SSL* ssl) {
  const auto& settings = *static_cast<TlsSettings*>(SSL_get_app_data(ssl));
  SSL_SESSION* session = SSL_SESSION_new();
  SSL_SESSION_set1_master_key(
      session, reinterpret_cast<const unsigned char*>(settings.key().data()), sizeof(Key));
  SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kAes128));
  SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  SSL_SESSION_set1_id_context(session, kContext, sizeof kContext);
  return session;
}

int offer_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* bytes,
              SSL_SESSION** session) {
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *bytes = kIdentity.size();
  *session = session_of(ssl);
  return 1;
}

int find_key(SSL* ssl, const unsigned char* identity, size_t bytes, SSL_SESSION** session) {
  const bool ours = std::string_view(reinterpret_cast<const char*>(identity), bytes) == kIdentity;
  *session = ours ? session_of(ssl) : nullptr;
  return 1;
}

}  // namespace

// ---- settings

TlsSettings::TlsSettings(const ProcessConfig& config, uint64_t most_records)
    : most_records_(most_records), context_(nullptr, SSL_CTX_free) {
  if (config.tls != "on") return;
  certified_ = !config.tls_cert.empty();
  way_ = certified_ ? "by-certificate" : "by-secret";
  key_ = hmac({}, {"tls", config.secret});
  context_.reset(SSL_CTX_new(TLS_method()));
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  SSL_CTX_set_ciphersuites(context, kSuites);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_quiet_shutdown(context, 1);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, 128 << 10);
  SSL_CTX_set_session_id_context(context, kContext, sizeof kContext);
  // An end without farewell is that of a connection; the session knows what has come.
  SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  if (certified_) {
    load(config);
  } else {
    SSL_CTX_set_psk_use_session_callback(context, offer_key);
    SSL_CTX_set_psk_find_session_callback(context, find_key);
  }
}

void TlsSettings::load(const ProcessConfig& config) {
  SSL_CTX* const context = context_.get();
  const auto check = [](int done, const char* variable, const std::string& file) {
    RINGCOMM_CHECK(done == 1, variable, file,
                   " cannot be used: ", reason_of(ERR_peek_last_error()));
  };
  ERR_clear_error();
  check(SSL_CTX_use_certificate_chain_file(context, config.tls_cert.c_str()),
        "RINGCOMM_TLS_CERT=", config.tls_cert);
  check(SSL_CTX_use_PrivateKey_file(context, config.tls_key.c_str(), SSL_FILETYPE_PEM),
        "RINGCOMM_TLS_KEY=", config.tls_key);
  check(SSL_CTX_load_verify_file(context, config.tls_ca.c_str()),
        "RINGCOMM_TLS_CA=", config.tls_ca);
}

// ---- a connection

Tls::Tls(const TlsSettings& settings, const Fd& socket, bool accepting)
    : settings_(settings), ssl_(SSL_new(settings.context()), SSL_free) {
  if (!ssl_) throw FlowError("OpenSSL makes no connection");
  SSL_set_app_data(ssl_.get(), const_cast<TlsSettings*>(&settings));
  BIO* const bio = bio_of(socket);
  SSL_set_bio(ssl_.get(), bio, bio);
  const auto role = accepting ? SSL_set_accept_state : SSL_set_connect_state;
  role(ssl_.get());
}

ssize_t Tls::read(std::span<std::byte> to) {
  ERR_clear_error();
  size_t bytes = 0;
  const int result = SSL_read_ex(ssl_.get(), to.data(), to.size(), &bytes);
  if (result != 1) return outcome(result);
  if (SSL_pending(ssl_.get()) == 0) ++opened_;
  return static_cast<ssize_t>(bytes);
}

// OpenSSL may read again, after EAGAIN, from where it read before: it does so where the kernel
// seals. By then a caller has its memory back. So OpenSSL sees a record of our own, and nothing
// else. The record stays as it is until all of it was taken.
ssize_t Tls::write(std::span<const iovec> parts) {
  if (unsent_ == 0) {
    record_.resize(kRecord);
    for (const iovec& part : parts) {
      const size_t taken = std::min(part.iov_len, kRecord - unsent_);
      std::memcpy(record_.data() + unsent_, part.iov_base, taken);
      unsent_ += taken;
    }
  }
  ERR_clear_error();
  size_t bytes = 0;
  const int result = SSL_write_ex(ssl_.get(), record_.data(), unsent_, &bytes);
  if (result != 1) return outcome(result);
  ++sealed_;
  return static_cast<ssize_t>(std::exchange(unsent_, 0));
}

ssize_t Tls::outcome(int result) {
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      errno = EAGAIN;
      return -1;
    case SSL_ERROR_SSL:
      refuse();
    default:
      return 0;
  }
}

void Tls::refuse() const {
  const unsigned long error = ERR_peek_last_error();
  const int reason = ERR_GET_REASON(error);
  char any = 0;  // OpenSSL forgets after an error that the handshake is over
  const bool shaken = SSL_get_peer_finished(ssl_.get(), &any, sizeof any) > 0;
  if (shaken && reason < SSL_AD_REASON_OFFSET) {
    throw ChangedError("a record was changed on the way");
  }
  const long verified = SSL_get_verify_result(ssl_.get());
  if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_UNSUPPORTED_PROTOCOL ||
      reason == SSL_AD_REASON_OFFSET + SSL_AD_PROTOCOL_VERSION) {
    throw StrangerError("it does not speak TLS 1.3: is RINGCOMM_TLS on at that rank, too?");
  }
  if (!settings_.has_certificate()) throw StrangerError();
  if (verified != X509_V_OK) {
    throw StrangerError(str("its certificate is refused: ", X509_verify_cert_error_string(verified),
                            " (RINGCOMM_TLS_CA has the authorities that count)"));
  }
  throw StrangerError(str("it refuses the certificate of RINGCOMM_TLS_CERT: ", reason_of(error)));
}

bool Tls::has_more() const { return SSL_has_pending(ssl_.get()) == 1; }
bool Tls::waits_to_read() const { return SSL_want_read(ssl_.get()) == 1; }

std::string Tls::binding() const {
  constexpr std::string_view label = "EXPORTER-ringcomm";
  std::string word(sizeof(Key), '\0');
  if (SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(word.data()),
                                 word.size(), label.data(), label.size(), nullptr, 0, 0) != 1) {
    throw FlowError("a connection without a word of its own");
  }
  return word;
}

}  // namespace ringcomm
