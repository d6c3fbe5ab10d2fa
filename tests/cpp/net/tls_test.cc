// TLS between two ends, by the secret and by certificates: what arrives, what the wire shows, and
// what is said where an end is none of the job's, or somebody stands between.
#include "net/tls.h"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <sys/syscall.h>

#include <set>

#include "certificates.h"
#include "cpp/harness.h"
#include "net/handshake.h"
#include "tls_pair.h"

namespace ringcomm::testing {
namespace {

// A kernel that seals bytes, as far as OpenSSL can tell: it is given them in clear.
struct SealingKernel {
  std::set<int> sockets;
  std::string taken;
  size_t room = 0;       // bytes that it takes before it says EAGAIN
  bool has_room = true;  // for any number
  std::span<const char> lent;
  bool saw_lent = false;
};
SealingKernel* kernel = nullptr;

}  // namespace
}  // namespace ringcomm::testing

// These stand in for libc's, for OpenSSL as well.
extern "C" {
#pragma GCC visibility push(default)
int setsockopt(int fd, int level, int name, const void* value, socklen_t bytes) noexcept {
  using ringcomm::testing::kernel;
  if (kernel != nullptr && level == IPPROTO_TCP && name == TCP_ULP) return 0;
  if (kernel != nullptr && level == SOL_TLS && name == TLS_TX) {
    kernel->sockets.insert(fd);
    return 0;
  }
  return static_cast<int>(::syscall(SYS_setsockopt, fd, level, name, value, bytes));
}

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  using ringcomm::testing::kernel;
  if (kernel == nullptr || !kernel->sockets.contains(fd)) {
    return ::syscall(SYS_sendto, fd, data, bytes, flags, nullptr, 0);
  }
  const auto* from = static_cast<const char*>(data);
  const auto lent = kernel->lent;
  kernel->saw_lent =
      kernel->saw_lent || (from < lent.data() + lent.size() && from + bytes > lent.data());
  const size_t taken = kernel->has_room ? bytes : std::min(bytes, kernel->room);
  if (taken == 0) {
    errno = EAGAIN;
    return -1;
  }
  kernel->room -= std::min(kernel->room, taken);
  kernel->taken.append(from, taken);
  return static_cast<ssize_t>(taken);
}
#pragma GCC visibility pop
}

namespace ringcomm::testing {
namespace {

bool has(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

std::string noise(size_t bytes, uint64_t seed) {
  Random random(seed);
  std::string all;
  while (all.size() < bytes) all += static_cast<char>(random.next());
  return all;
}

// Both send at once, more than the sockets hold.
void exchange(const ProcessConfig& caller, const ProcessConfig& acceptor) {
  TlsPair pair(caller, acceptor);
  const std::string words[] = {noise(700'000, 1), noise(300'001, 2)};
  for (const int end : {0, 1}) pair.ends[size_t(end)]->unsent = words[end];
  pair.run();
  for (const int end : {0, 1}) {
    const TlsEnd& here = *pair.ends[size_t(end)];
    require(here.refusal.empty(), here.refusal);
    require(here.got == words[1 - end], "got ", here.got.size(), " bytes, or others");
    for (size_t at = 0; at + 16 <= words[end].size(); at += 1000) {
      require(!has(pair.said[size_t(end)], words[end].substr(at, 16)), "the wire shows byte ", at);
    }
  }
  require(pair.ends[0]->binding() == pair.ends[1]->binding(), "two words of one connection");
  TlsPair other(caller, acceptor);
  other.run();
  require(pair.ends[0]->binding() != other.ends[0]->binding(), "one word of two connections");
}

void by_the_secret() { exchange(by_secret("bees"), by_secret("bees")); }

void by_certificates() {
  const Authority authority("ours");
  exchange(authority.config(), authority.config());
}

// Neither end gets a byte of the other's, and the one that calls says why.
std::string refused(const ProcessConfig& caller, const ProcessConfig& acceptor) {
  TlsPair pair(caller, acceptor);
  for (auto& end : pair.ends) end->unsent = "the words of a session";
  pair.run();
  require(pair.ends[1]->got.empty(), "the acceptor takes the words of a stranger");
  // In TLS 1.3 one that calls is through first. It hears later that it was refused.
  require(pair.ends[0]->got.empty(), "the caller takes the words of a stranger");
  require(!pair.ends[0]->refusal.empty(), "the caller says nothing");
  require(!pair.ends[1]->refusal.empty(), "the acceptor says nothing");
  return str(pair.ends[0]->refusal, " | ", pair.ends[1]->refusal);
}

void refused_with(const std::string& said, const ProcessConfig& caller,
                  const ProcessConfig& acceptor) {
  const std::string heard = refused(caller, acceptor);
  require(has(heard, said), heard);
}

void another_secret() {
  const std::string heard = refused(by_secret("bees"), by_secret("wasps"));
  const std::string_view text = "it does not know the secret of this job";
  require(heard.starts_with(text), heard);
}

void other_authorities() {
  const Authority ours("ours"), theirs("theirs");
  const std::string unknown = "its certificate is refused: ";
  refused_with(unknown, ours.config(), theirs.config());
  refused_with(unknown, theirs.config(), ours.config());
  // One end alone refuses, and the other hears of it.
  refused_with("it refuses the certificate of RINGCOMM_TLS_CERT", theirs.config(ours),
               ours.config());
  refused_with("it refuses the certificate of RINGCOMM_TLS_CERT", ours.config(),
               theirs.config(ours));
  refused_with("its certificate is refused: certificate has expired", ours.config(),
               ours.config(ours, -3600));
}

void secret_and_certificate() {
  const Authority ours("ours");
  refused(by_secret("bees"), ours.config());
  refused(ours.config(), by_secret("bees"));
}

// Words of another protocol, as those of a rank whose RINGCOMM_TLS is off.
void plain_words() {
  for (const bool accepting : {false, true}) {
    TlsEnd end(by_secret("bees"), accepting);
    end.step();
    end.put_on_wire("rc\x01 hello, who is there? Nobody encrypts here, nor ever did." +
                    std::string(200, 'x'));
    require(has(end.refusal, "it does not speak TLS 1.3: is RINGCOMM_TLS on at that rank, too?"),
            end.refusal);
  }
}

// An end that would be content with less: OpenSSL's own, of TLS 1.2.
void old_versions() {
  const Authority ours("ours");
  const ProcessConfig files = ours.config();
  for (const bool accepting : {false, true}) {
    const TlsSettings settings(files);
    SSL_CTX_set_min_proto_version(settings.context(), TLS1_2_VERSION);
    SSL_CTX_set_max_proto_version(settings.context(), TLS1_2_VERSION);
    auto sockets = connected_sockets();
    Tls old(settings, sockets[0], !accepting);
    TlsEnd end(files, accepting);
    for (int turn = 0; turn < 6; ++turn) {
      std::array<std::byte, 4096> buffer;
      try {
        old.read(buffer);
      } catch (const FlowError&) {
        // It is refused.
      }
      const ssize_t bytes = ::recv(sockets[1].get(), buffer.data(), buffer.size(), 0);
      if (bytes > 0) end.put_on_wire({reinterpret_cast<char*>(buffer.data()), size_t(bytes)});
      end.step();
      const std::string answer = end.take_from_wire();
      ::send(sockets[1].get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
    require(has(end.refusal, "it does not speak TLS 1.3"), end.refusal);
  }
}

// One bit of one byte, at places all over the handshake and the records.
void changed_bytes() {
  const std::string words = noise(50'000, 3);
  int changed = 0;
  for (size_t at = 0; at < 52'000; at += at < 1'500 ? 7 : 997) {
    for (const int sender : {0, 1}) {
      TlsPair pair(by_secret("bees"), by_secret("bees"));
      for (auto& end : pair.ends) end->unsent = words;
      size_t passed = 0;
      bool hit = false;
      pair.run([&](int from, std::string bytes) {
        if (from != sender) return bytes;
        if (at >= passed && at < passed + bytes.size()) {
          bytes[at - passed] = static_cast<char>(bytes[at - passed] ^ (1 << at % 8));
          hit = true;
        }
        passed += bytes.size();
        return bytes;
      });
      const TlsEnd& reader = *pair.ends[size_t(1 - sender)];
      require(words.starts_with(reader.got), "another byte than was sent, at ", at);
      require(!hit || reader.got != words, "nobody saw that byte ", at, " was changed");
      changed += reader.refusal.starts_with("changed: ") ? 1 : 0;
    }
  }
  require(changed > 50, "only ", changed, " were said to be changed");
}

// All that a caller has ever said, once more: nobody acts on it.
void replayed() {
  TlsPair pair(by_secret("bees"), by_secret("bees"));
  pair.ends[0]->unsent = "the words of a session";
  pair.run();
  require(pair.ends[1]->got == "the words of a session", "nothing to record");
  TlsEnd again(by_secret("bees"), true);
  again.put_on_wire(pair.said[0]);
  require(again.got.empty(), "it acts on what was recorded");
  require(!again.refusal.empty(), "it does not mind");
}

class Member final : public Party {
 public:
  const Key& key() const override { return key_; }
  int flows() const override { return 1; }
  uint64_t generation(int) const override { return 0; }
  Cursor fence(int) override { return {}; }

 private:
  const Key key_{};  // the same for both
};

// Who has a certificate of the authority answers for the one that was called, calls that one
// himself, and passes on all that is said. The keys of the pair he has not.
void somebody_between() {
  const Authority ours("ours");
  TlsPair near(ours.config(), ours.config()), far(ours.config(), ours.config());
  near.run(), far.run();
  Member member;
  Handshake caller(random_id(), {}, 0, member), acceptor(ProcessId{});
  caller.bind(near.ends[0]->binding());
  acceptor.bind(far.ends[1]->binding());
  acceptor.take(caller.output().data());
  acceptor.with(member);
  try {
    caller.take(acceptor.output().data());
  } catch (const StrangerError& error) {
    require(has(error.what(), "somebody stands between"), error.what());
    return;
  }
  throw Failure("nobody sees him");
}

// The kernel seals, and takes a part of what is sent. Then the lender has its memory back and
// changes it; the bytes that were posted lie elsewhere.
void sealed_by_the_kernel() {
  SealingKernel here;
  const TlsSettings settings(by_secret("bees"));
  auto sockets = connected_sockets();
  Tls caller(settings, sockets[0], false), acceptor(settings, sockets[1], true);
  const Finally over{[] { kernel = nullptr; }};
  for (int turn = 0; turn < 6; ++turn) {
    std::array<std::byte, 64> nothing;
    kernel = &here;
    caller.read(nothing);
    kernel = nullptr;
    acceptor.read(nothing);
  }
  require(here.sockets.contains(sockets[0].get()), "OpenSSL does not ask the kernel to seal");
  kernel = &here;
  const std::string posted = noise(100'000, 4);
  std::string tensor = posted, kept = posted;
  here.lent = tensor;
  here.has_room = false;
  size_t sent = 0;
  for (std::string* from = &tensor; sent < posted.size();) {
    here.room = from == &tensor ? 5'000 : here.room + 7'000;
    const iovec part{from->data() + sent, posted.size() - sent};
    const ssize_t bytes = caller.write({&part, 1});
    if (bytes > 0) sent += static_cast<size_t>(bytes);
    if (bytes > 0 || from != &tensor) continue;
    std::ranges::fill(tensor, 'x');
    from = &kept;
  }
  require(!here.saw_lent, "the kernel was given memory of the lender");
  require(here.taken == posted, "other bytes were sealed than were posted");
}

void unusable_files() {
  const Authority ours("ours");
  ProcessConfig config = ours.config();
  config.tls_key = ours.config().tls_key;  // of another certificate
  try {
    const TlsSettings settings(config);
  } catch (const UsageError& error) {
    const std::string said = str("RINGCOMM_TLS_KEY=", config.tls_key, " cannot be used: ");
    require(std::string(error.what()).starts_with(said), error.what());
    return;
  }
  throw Failure("a key that does not fit is taken");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"by the secret", by_the_secret},
                     {"by certificates", by_certificates},
                     {"another secret", another_secret},
                     {"other authorities", other_authorities},
                     {"secret and certificate", secret_and_certificate},
                     {"plain words", plain_words},
                     {"old versions", old_versions},
                     {"changed bytes", changed_bytes},
                     {"replayed", replayed},
                     {"somebody between", somebody_between},
                     {"sealed by the kernel", sealed_by_the_kernel},
                     {"unusable files", unusable_files}},
                    argc, argv);
}
