// Certificates for tests: an authority, which signs those of ranks. Files in a folder that goes.
#pragma once

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "base/config.h"
#include "cpp/harness.h"

namespace ringcomm::testing {

class Authority {
 public:
  explicit Authority(const std::string& name)
      : key_(EVP_EC_gen("P-256")), certificate_(X509_new()), name_(name) {
    std::string folder = std::filesystem::temp_directory_path() / "ringcomm-test-XXXXXX";
    require(::mkdtemp(folder.data()) != nullptr, "no temporary folder");
    folder_ = folder;
    sign(certificate_, key_, kDay);
    write(file("ca"), [&](FILE* to) { return PEM_write_X509(to, certificate_); });
  }
  ~Authority() {
    std::filesystem::remove_all(folder_);
    X509_free(certificate_);
    EVP_PKEY_free(key_);
  }
  Authority(const Authority&) = delete;

  // For a rank with a new certificate of this authority, which trusts `trusted`.
  ProcessConfig config(const Authority& trusted, long seconds = kDay) const {
    const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"),
                                                                  EVP_PKEY_free);
    const std::unique_ptr<X509, decltype(&X509_free)> rank(X509_new(), X509_free);
    sign(rank.get(), key.get(), seconds);
    const std::string number = std::to_string(++made_);
    write(file("cert" + number), [&](FILE* to) { return PEM_write_X509(to, rank.get()); });
    write(file("key" + number), [&](FILE* to) {
      return PEM_write_PrivateKey(to, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
    });
    ProcessConfig config;
    config.tls = "on";
    config.tls_cert = file("cert" + number);
    config.tls_key = file("key" + number);
    config.tls_ca = trusted.file("ca");
    return config;
  }
  ProcessConfig config() const { return config(*this); }

 private:
  static constexpr long kDay = 86'400;

  std::string file(const std::string& name) const { return folder_ / (name + ".pem"); }

  void sign(X509* certificate, EVP_PKEY* key, long seconds) const {
    X509_set_version(certificate, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1 + made_);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -kDay);
    X509_gmtime_adj(X509_getm_notAfter(certificate), seconds);
    X509_set_pubkey(certificate, key);
    const auto entry = [](X509_NAME* name, const std::string& text) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(text.c_str());
      X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, bytes, -1, -1, 0);
    };
    entry(X509_get_issuer_name(certificate), name_);
    const bool is_own = key == key_;
    entry(X509_get_subject_name(certificate), is_own ? name_ : "rank");
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints,
                                                    is_own ? "critical,CA:TRUE" : "CA:FALSE");
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
    require(X509_sign(certificate, key_, EVP_sha256()) > 0, "no signature");
  }

  static void write(const std::string& path, const std::function<int(FILE*)>& content) {
    const std::unique_ptr<FILE, decltype(&std::fclose)> to(std::fopen(path.c_str(), "w"),
                                                           std::fclose);
    require(to && content(to.get()) == 1, "cannot write ", path);
  }

  EVP_PKEY* const key_;
  X509* const certificate_;
  const std::string name_;
  std::filesystem::path folder_;
  mutable int made_ = 0;
};

}  // namespace ringcomm::testing
